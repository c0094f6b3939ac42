// Messages of a topic: browse from a place, follow the end, look into one, produce it again.
//
// Opening reads the newest messages on the server's disk. What lies in the object store is read when a person says so.

import { events, get, topicPath } from "./api.js";
import { button, fill, h, select } from "./dom.js";
import { bytes, count, counted, fromBase64, hexDump, hexLine, localInput, moment, textOf } from "./format.js";
import { produceDialog } from "./produce.js";
import { isReadOnly } from "./state.js";
import { empty, notice, problemNotice, toast } from "./widgets.js";

const NEWEST = 50;
const MOST_READ = 10000; // what one request may ask for
const KEPT_LIVE = 500;
const LIVE_PER_SECOND = 40;
const PREVIEW = 240;

/** A message with its bytes. */
function unpacked(message) {
  const decode = (text) => (text === null ? null : fromBase64(text));
  return {
    partition: message.partition,
    offset: message.offset,
    timestamp: message.timestamp,
    key: decode(message.key),
    value: decode(message.value),
    headers: message.headers.map(([name, content]) => [name, decode(content)]),
  };
}

function jsonOf(text) {
  if (text === null || !/^\s*[[{"\-0-9tfn]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Bytes in one of the forms, in one line. */
function preview(data, form) {
  if (data === null) return h("span", { class: "null" }, "null");
  const part = data.subarray(0, PREVIEW);
  const rest = data.length > PREVIEW ? "…" : "";
  if (form === "hex") return hexLine(part.subarray(0, 64)) + (data.length > 64 ? "…" : "");
  const text = textOf(data);
  if (text === null) return h("span", { class: "binary" }, hexLine(part.subarray(0, 32)) + (data.length > 32 ? "…" : ""));
  return text.slice(0, PREVIEW).replace(/\s+/g, " ") + rest;
}

function whole(data, form) {
  if (data === null) return h("p", { class: "null" }, "null: with a key, this is a tombstone");
  const text = textOf(data);
  if (form === "hex" || text === null) return h("pre", {}, hexDump(data));
  const parsed = form === "text" ? undefined : jsonOf(text);
  return h("pre", {}, parsed === undefined ? text : JSON.stringify(parsed, null, 2));
}

function matches(message, wanted) {
  if (!wanted) return true;
  const texts = [message.key, message.value, ...message.headers.map(([, content]) => content)];
  const hit = (data) => data !== null && (textOf(data) ?? hexLine(data)).toLowerCase().includes(wanted);
  return texts.some(hit) || message.headers.some(([name]) => name.toLowerCase().includes(wanted)) || String(message.offset) === wanted;
}

export function messagesPart(context, name, description) {
  const { signal } = context;
  const count_ = description.partitions.length;
  const state = { messages: [], next: {}, first: {}, open: null, form: "auto", filter: "", live: null, paused: false, waiting: [], skipped: 0, dropped: 0, turn: 0, newestFirst: true };
  const from = select([["newest", "newest"], ["offset", "offset"], ["time", "time"], ["earliest", "beginning"]], "newest", { "aria-label": "Read from", onchange: () => showPlace() });
  const offset = h("input", { type: "number", min: 0, value: "0", "aria-label": "Offset" });
  const time = h("input", { type: "datetime-local", step: 1, value: localInput(new Date(Date.now() - 3600e3)), "aria-label": "Time" });
  const partition = select([["", "all partitions"], ...description.partitions.map((one) => [String(one.partition), `partition ${one.partition}`])], "", { "aria-label": "Partition" });
  const limit = select(["20", "50", "100", "500"], "50", { "aria-label": "How many" });
  const form = select([["auto", "JSON or text"], ["text", "text"], ["hex", "hex"]], "auto", { "aria-label": "Show as", onchange: () => {
    state.form = form.value;
    draw();
  } });
  const filter = h("input", { type: "search", placeholder: "Filter what was read", "aria-label": "Filter what was read", "data-filter": true, oninput: () => {
    state.filter = filter.value.toLowerCase();
    draw();
  } });
  const follow = button("Follow live", () => (state.live ? stopLive() : startLive()), { kind: "live-button" });
  const pause = button("Pause", () => {
    state.paused = !state.paused;
    if (!state.paused) takeWaiting();
    draw();
  });
  const place = h("span");
  const says = h("div", { class: "says", role: "status" });
  const body = h("tbody");
  const table = h("div", { class: "scroll" }, h("table", { class: "messages" }, h("caption", { class: "hidden" }, "Messages"), h("thead", {}, h("tr", {}, [count_ > 1 && h("th", { scope: "col", class: "number" }, "Part."), h("th", { scope: "col", class: "number" }, "Offset"), h("th", { scope: "col" }, "Time"), h("th", { scope: "col" }, "Key"), h("th", { scope: "col" }, "Value")])), body));
  const list = h("div", {}, table);
  const pages = h("div", { class: "row centre" });
  const controls = h(
    "form",
    { class: "bar", onsubmit: (event) => {
      event.preventDefault();
      stopLive();
      read().catch(failed);
    } },
    h("span", { class: "muted" }, "From"), from, place, count_ > 1 && partition, limit,
    h("button", { type: "submit", class: "primary" }, "Read"),
    follow, form, filter,
  );
  const element = h("div", {}, controls, says, list, pages);

  function showPlace() {
    fill(place, from.value === "offset" ? offset : from.value === "time" ? time : null);
  }

  function failed(error) {
    if (error.name === "AbortError") return;
    fill(says, problemNotice(error));
  }

  const chosen = () => description.partitions.filter((one) => partition.value === "" || String(one.partition) === partition.value);

  /** Where to begin, and whether that reads the store. Only offsets below those on the disk do. */
  function places() {
    const most = Number(limit.value);
    const parts = chosen();
    const offsets = {};
    let isCold = false;
    for (const one of parts) {
      const at = from.value === "earliest" ? one.start_offset : from.value === "offset" ? Number(offset.value) : Math.max(one.start_offset, one.next_offset - most);
      offsets[one.partition] = Math.min(Math.max(at, one.start_offset), one.next_offset);
      isCold ||= offsets[one.partition] < one.hot_start_offset;
    }
    if (from.value === "time") return { offset: new Date(time.value).toISOString(), partition: partition.value, isCold: parts.some((one) => one.hot_start_offset > one.start_offset) };
    return { offsets: JSON.stringify(offsets), isCold };
  }

  async function look() {
    const fresh = await get(topicPath(name), {}, signal);
    description.partitions = fresh.partitions;
  }

  async function read() {
    const mine = (state.turn += 1);
    await look();
    if (mine !== state.turn) return;
    if (from.value === "offset" && partition.value === "") {
      const one = description.partitions.find((each) => Number(offset.value) > each.next_offset || Number(offset.value) < each.start_offset);
      if (one && count_ === 1) throw new Error(`offset ${offset.value} is not in the topic, which holds ${count(one.start_offset)} up to ${count(one.next_offset)}`);
    }
    const query = places();
    if (query.isCold) {
      const what = from.value === "time" ? "A time is looked up in the object store when it is older than what this disk has." : "These messages are in the object store.";
      fill(says, notice("warn", h("p", {}, what, " Reading them costs requests and traffic there."), button("Read from the store", () => fetchMessages(query).catch(failed), { kind: "primary" })));
      return;
    }
    await fetchMessages(query);
  }

  async function fetchMessages(query, where = "instead") {
    const mine = (state.turn += 1);
    const isNewest = from.value === "newest" && where === "instead";
    fill(says, h("span", { class: "muted" }, "Reading…"));
    const { isCold, ...rest } = query;
    // The newest of all partitions are among the newest of each, and a limit cuts off at the newer end.
    const most = isNewest ? Math.min(Number(limit.value) * description.partitions.length, MOST_READ) : limit.value;
    const found = await get(topicPath(name, "messages"), { ...rest, limit: most, encoding: "base64", max_bytes: 4 << 20, on_gap: "skip" }, signal);
    if (mine !== state.turn) return; // a later choice has overtaken it
    const messages = found.messages.map(unpacked);
    if (where === "instead") Object.assign(state, { first: {}, newestFirst: isNewest });
    for (const one of messages) state.first[one.partition] = Math.min(state.first[one.partition] ?? Infinity, one.offset);
    if (where !== "before") state.next = found.next_offsets;
    if (isNewest) messages.splice(0, messages.length - Number(limit.value));
    state.messages = where === "after" ? [...state.messages, ...messages] : where === "before" ? [...messages, ...state.messages] : messages;
    state.open = null;
    context.worked();
    fill(says);
    draw();
  }

  const inOrder = (all) => (state.newestFirst ? [...all].reverse() : all);

  function draw() {
    const hidden = isReadOnly();
    const shown = state.messages.filter((one) => matches(one, hidden ? "" : state.filter));
    fill(body, inOrder(shown).map((message) => row(message, hidden)));
    fill(follow, state.live ? "Stop following" : "Follow live");
    follow.classList.toggle("on", Boolean(state.live));
    if (state.live) {
      const parts = [state.paused ? `Paused, ${counted(state.waiting.length, "message")} waiting` : "Following the end", state.skipped ? `${counted(state.skipped, "message")} skipped: at most ${LIVE_PER_SECOND} a second are shown` : null, state.dropped ? `the newest ${KEPT_LIVE} are kept` : null];
      fill(pause, state.paused ? "Go on" : "Pause");
      fill(says, h("span", { class: state.paused ? "pulse off" : "pulse", "aria-hidden": "true" }), parts.filter(Boolean).join(" · "), " ", pause);
    }
    if (shown.length === 0) {
      const nothing = state.messages.length > 0 ? empty("Nothing matches", `None of the ${counted(state.messages.length, "message")} that were read has this text. Read on, or clear the filter.`) : state.live ? empty("Waiting", "New messages appear here as they arrive.") : empty("No messages here", "There is nothing at this place. Read from another one, or produce a message.");
      fill(list, nothing);
    } else if (!list.contains(table)) fill(list, table);
    const isBefore = Object.entries(state.first).some(([number, first]) => first > (description.partitions[number]?.start_offset ?? 0));
    fill(pages, !state.live && state.messages.length > 0 && [isBefore && button("Read older", () => readOlder()), button("Read newer", () => readNewer()), h("span", { class: "muted small" }, `${counted(state.messages.length, "message")} read${shown.length < state.messages.length ? `, ${count(shown.length)} shown` : ""}`)]);
  }

  function readOlder() {
    const most = Number(limit.value);
    const firsts = Object.entries(state.first);
    const before = firsts.map(([number, first]) => [number, Math.max(description.partitions[number].start_offset, first - most), first]).filter(([, at, first]) => at < first);
    const query = { offsets: JSON.stringify(Object.fromEntries(before.map(([number, at]) => [number, at]))) };
    const go = async () => {
      try {
        const found = await get(topicPath(name, "messages"), { ...query, limit: Math.min(10000, most * before.length), encoding: "base64", max_bytes: 16 << 20, on_gap: "skip" }, signal);
        const ends = Object.fromEntries(before.map(([number, , first]) => [number, first]));
        const older = found.messages.map(unpacked).filter((one) => one.offset < ends[one.partition]);
        for (const [number, at] of before) state.first[number] = at;
        state.messages = [...older, ...state.messages];
        fill(says);
        draw();
      } catch (error) {
        failed(error);
      }
    };
    if (before.some(([number, at]) => at < description.partitions[number].hot_start_offset)) {
      fill(says, notice("warn", h("p", {}, "Older messages are in the object store. Reading them costs requests and traffic there."), button("Read from the store", go, { kind: "primary" })));
    } else go();
  }

  const readNewer = () => fetchMessages({ offsets: JSON.stringify(state.next) }, "after").catch(failed);

  function row(message, hidden) {
    const id = `${message.partition}:${message.offset}`;
    const isOpen = state.open === id;
    const size = (message.key?.length ?? 0) + (message.value?.length ?? 0);
    const line = h(
      "tr",
      { class: "pick", tabindex: "-1", "aria-expanded": String(isOpen), "data-offset": message.offset, onclick: () => {
        state.open = isOpen ? null : id;
        draw();
        body.querySelector(`tr[data-offset="${message.offset}"]`)?.focus({ preventScroll: true });
      } },
      count_ > 1 && h("td", { class: "number" }, message.partition),
      h("td", { class: "number" }, count(message.offset)),
      h("td", { class: "time" }, moment(message.timestamp)),
      h("td", { class: "key" }, hidden ? "•••" : message.key === null ? h("span", { class: "null" }, "–") : preview(message.key, state.form)),
      h("td", { class: "value" }, hidden ? `••• ${bytes(size)}` : preview(message.value, state.form)),
    );
    return isOpen ? [line, detail(message, hidden)] : line;
  }

  function detail(message, hidden) {
    const facts = [["Partition", message.partition], ["Offset", count(message.offset)], ["Time", `${moment(message.timestamp)} (${message.timestamp})`], ["Size", `${bytes(message.value?.length ?? 0)} value, ${bytes(message.key?.length ?? 0)} key`]];
    const content = hidden
      ? notice("", "Read-only mode hides what messages hold.")
      : [
          message.key !== null && [h("h3", {}, "Key"), whole(message.key, state.form)],
          message.headers.length > 0 && [h("h3", {}, "Headers"), h("table", { class: "facts" }, h("tbody", {}, message.headers.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, preview(value, state.form))))))],
          h("h3", {}, "Value"),
          whole(message.value, state.form),
          h("div", { class: "row" },
            button("Copy value", async () => {
              await navigator.clipboard.writeText(message.value === null ? "" : textOf(message.value) ?? hexLine(message.value));
              toast("Copied");
            }),
            button("Produce again…", () => produceDialog(name, description, message, () => {})),
          ),
        ];
    return h("tr", { class: "detail" }, h("td", { colspan: count_ > 1 ? 5 : 4 }, h("dl", { class: "facts" }, facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))), content));
  }

  // Live

  async function startLive() {
    const ending = new AbortController();
    signal.addEventListener("abort", () => ending.abort());
    state.turn += 1;
    fill(says);
    Object.assign(state, { live: ending, newestFirst: true, messages: [], waiting: [], first: {}, paused: false, skipped: 0, dropped: 0, open: null });
    draw();
    let last = 0;
    try {
      for await (const { event, data } of events(topicPath(name, "tail"), { encoding: "base64", max_per_second: LIVE_PER_SECOND, partition: partition.value }, ending.signal)) {
        if (event === "skipped") state.skipped += data.count;
        else if (event === "message") state.waiting.push(unpacked(data));
        else if (event === "alive") element.dataset.following = "yes";
        if (state.waiting.length > KEPT_LIVE) state.dropped += state.waiting.splice(0, state.waiting.length - KEPT_LIVE).length;
        clearTimeout(last);
        last = setTimeout(() => {
          if (!state.paused) takeWaiting();
          draw();
        }, 100);
      }
      if (state.live === ending) throw new Error("the server ended the stream: it stops, or the topic was deleted");
    } catch (error) {
      if (state.live === ending) {
        stopLive();
        failed(error);
      }
    }
  }

  function takeWaiting() {
    state.messages.push(...state.waiting.splice(0));
    if (state.messages.length > KEPT_LIVE) state.dropped += state.messages.splice(0, state.messages.length - KEPT_LIVE).length;
  }

  function stopLive() {
    if (!state.live) return;
    state.live.abort();
    state.live = null;
    delete element.dataset.following;
    takeWaiting();
    state.next = {};
    for (const one of description.partitions) state.next[one.partition] = one.next_offset;
    for (const one of state.messages) state.next[one.partition] = Math.max(state.next[one.partition] ?? 0, one.offset + 1);
    fill(says);
    draw();
  }

  context.main.addEventListener("escape", () => {
    if (state.open === null) return;
    state.open = null;
    draw();
  }, { signal });

  showPlace();
  // The newest that are on the disk: nothing is read from the store because a page was opened.
  const hot = {};
  for (const one of description.partitions) hot[one.partition] = Math.max(one.start_offset, one.hot_start_offset, one.next_offset - NEWEST);
  fetchMessages({ offsets: JSON.stringify(hot) }).catch(failed);
  return { element, refresh: () => (state.live ? null : read().catch(failed)) };
}
