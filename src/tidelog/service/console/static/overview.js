// All topics: where they stand, how fast they grow, who waits, and what a lost disk would cost. It asks for nothing that
// would open a topic or read the store.

import { get, topicPath, api } from "./api.js";
import { button, field, fill, h } from "./dom.js";
import { bytes, count, counted, duration, rate } from "./format.js";
import { isReadOnly, rateOf, sample, samplesOf } from "./state.js";
import { chart, dialog, empty, sortedTable, strip, stripLegend, tell, toast } from "./widgets.js";

const REFRESH_SECONDS = 3;
const LAG_SECONDS = 15;
const PAGE_ROWS = 50;

/** The sums of a topic's open partitions; null when none is open. */
export function standing(topic) {
  const parts = topic.open_partitions || [];
  if (!parts.length) return null;
  const sum = (pick) => parts.reduce((total, one) => total + pick(one), 0);
  return {
    messages: sum((one) => one.next_offset - one.start_offset),
    next: sum((one) => one.next_offset),
    unshipped: sum((one) => one.next_offset - Math.max(one.start_offset, Math.min(one.shipped_offset, one.next_offset))),
    unshippedBytes: sum((one) => one.unshipped_bytes ?? one.hot_bytes),
    seconds: Math.max(...parts.map((one) => one.unshipped_seconds ?? 0)),
    hotBytes: sum((one) => one.hot_bytes),
    epochs: [...new Set(parts.map((one) => one.epoch))],
    isComplete: parts.length === topic.partitions,
  };
}

/** In a cluster: whether other nodes serve some of its partitions. What this page measures is of this node. */
const isElsewhere = (topic) => Boolean(topic.nodes);

function ownersOf(topic, server) {
  const served = Object.entries(topic.nodes).sort();
  const missing = topic.partitions - served.reduce((sum, [, number]) => sum + number, 0);
  return h("a", { href: "#/cluster", title: `this is node ${server.node}` }, served.map(([node, number]) => `${node} ${number}`).join(", "), missing > 0 && ` nobody ${missing}`);
}

export const topicLink = (name, ...rest) => `#/topics/${[...name.split("/"), ...rest].map(encodeURIComponent).join("/")}`;

/** Several partitions as one strip, as if their messages were one after the other in each tier. */
function joined(parts) {
  const sum = (pick) => parts.reduce((total, one) => total + pick(one), 0);
  const next = sum((one) => one.next_offset - one.start_offset);
  return {
    start_offset: 0,
    next_offset: next,
    hot_start_offset: sum((one) => Math.max(0, one.hot_start_offset - one.start_offset)),
    shipped_offset: sum((one) => Math.max(0, one.shipped_offset - one.start_offset)),
    cached_messages: sum((one) => Math.min(one.cached_messages, one.next_offset - one.start_offset)),
  };
}

export async function overview(context) {
  const { main, server, signal } = context;
  document.title = "Topics – tidelog";
  const lags = new Map();
  const state = { topics: [], filter: "", shown: PAGE_ROWS };
  const point = h("section", { class: "cards", "aria-label": "Restore point" });
  const more = h("div", { class: "row centre" });
  const filter = h("input", { type: "search", placeholder: "Filter topics", "aria-label": "Filter topics", "data-filter": true, oninput: () => {
    state.filter = filter.value.toLowerCase();
    state.shown = PAGE_ROWS;
    draw();
  } });
  const table = sortedTable({
    caption: "Topics",
    sort: "name",
    onselect: (row) => {
      location.hash = topicLink(row.name);
    },
    empty: "No topic has this in its name.",
    columns: columns(server),
  });
  const list = h("div");
  fill(
    main,
    h("div", { class: "title" }, h("h1", {}, "Topics"), !isReadOnly() && button("Create topic", () => createTopic(), { kind: "primary" })),
    point,
    list,
  );

  function draw() {
    if (state.topics.length === 0) {
      fill(list, empty("No topics yet", `Produce to one, or create it here. Clients of Kafka connect to ${server.kafka}.`, !isReadOnly() && button("Create topic", () => createTopic(), { kind: "primary" })));
      return;
    }
    const found = state.topics.filter((one) => one.name.toLowerCase().includes(state.filter));
    if (!list.contains(table.element)) {
      fill(list, h("div", { class: "bar" }, filter, stripLegend(server.has_store)), table.element, more);
    }
    state.visible = found.slice(0, state.shown);
    table.update(state.visible.map((one) => ({ ...one, stand: standing(one), lag: lags.get(one.name), rate: rateOf(`next ${one.name}`), open: () => openTopics([one.name]) })));
    fill(more, found.length > state.shown && button(`Show ${count(Math.min(PAGE_ROWS, found.length - state.shown))} more of ${count(found.length)}`, () => {
      state.shown += PAGE_ROWS;
      draw();
    }));
  }

  async function refresh() {
    const topics = [];
    let after = "";
    do {
      const page = await get("/v1/topics", { standing: true, limit: 1000, after }, signal);
      topics.push(...page.topics);
      after = page.next || "";
    } while (after);
    context.worked();
    state.topics = topics;
    let total = 0;
    for (const one of topics) {
      const stand = standing(one);
      if (stand) {
        sample(`next ${one.name}`, stand.next);
        total += stand.unshipped;
      }
    }
    sample("unshipped", total);
    fill(point, restorePoint(server, topics, openTopics));
    draw();
  }

  async function openTopics(names) {
    try {
      for (const name of names) await get(topicPath(name), {}, signal);
      await refresh();
    } catch (error) {
      tell(error);
    }
  }

  async function refreshLags() {
    for (const one of state.visible || []) {
      if (signal.aborted) return;
      if (!standing(one)?.isComplete) continue;
      const found = await get(topicPath(one.name, "subscriptions"), {}, signal);
      const lag = found.subscriptions.reduce((most, each) => Math.max(most, each.lag_messages), 0);
      lags.set(one.name, { most: lag, count: found.subscriptions.length });
    }
    draw();
  }

  await context.every(REFRESH_SECONDS, refresh);
  if (!signal.aborted) await context.every(LAG_SECONDS, refreshLags);
}

function columns(server) {
  const stand = (row, pick, or) => (row.stand ? pick(row.stand) : or);
  return [
    { key: "name", label: "Topic", value: (row) => row.name, class: "name", cell: (row) => [h("a", { href: topicLink(row.name) }, row.name), row.partitions > 1 && h("span", { class: "muted small" }, ` ${row.partitions} partitions`)] },
    { key: "strip", label: "Where it is", class: "where", cell: (row) => (row.stand ? strip(joined(row.open_partitions), server.has_store, { small: true }) : isElsewhere(row) ? h("span", { class: "muted" }, "on other nodes") : button("Open", row.open, { kind: "quiet", title: "Not open since the server started. Opening reads its catalog and no messages." })) },
    { key: "messages", label: "Messages", number: true, value: (row) => stand(row, (one) => one.messages, -1), cell: (row) => stand(row, (one) => count(one.messages), "–") },
    { key: "rate", label: "Rate", number: true, value: (row) => row.rate ?? -1, cell: (row) => rate(row.rate) },
    { key: "lag", label: "Largest lag", number: true, value: (row) => row.lag?.most ?? -1, cell: (row) => (row.lag?.count ? h("a", { href: topicLink(row.name, "subscriptions") }, count(row.lag.most)) : "–") },
    { key: "lost", label: "On this disk only", number: true, value: (row) => stand(row, (one) => one.unshipped, -1), cell: (row) => stand(row, (one) => (one.unshipped ? h("span", { class: server.has_store ? "warn" : null, title: bytes(one.unshippedBytes) }, count(one.unshipped)) : "0"), "–") },
    { key: "owner", label: "Owner", value: (row) => stand(row, (one) => Math.max(...one.epochs), -1), cell: (row) => isElsewhere(row) ? ownersOf(row, server) : stand(row, (one) => h("span", { title: `node ${server.node}` }, one.epochs[0] ? `this node, epoch ${one.epochs.join(", ")}` : "this node"), "–") },
  ];
}

function restorePoint(server, topics, openTopics) {
  const stands = topics.map((one) => [one, standing(one)]);
  const opened = stands.filter(([, one]) => one);
  const sum = (pick) => opened.reduce((total, [, one]) => total + pick(one), 0);
  const unshipped = sum((one) => one.unshipped);
  const elsewhere = topics.some(isElsewhere);
  const closed = stands.filter(([topic, one]) => !isElsewhere(topic) && (!one || !one.isComplete)).map(([topic]) => topic.name);
  const behind = opened.filter(([, one]) => one.unshipped > 0);
  const oldest = Math.max(0, ...behind.map(([, one]) => one.seconds));
  const into = opened.map(([one]) => rateOf(`next ${one.name}`)).filter((one) => one !== null);
  const card = (title, value, note, kind = "") => h("div", { class: `card ${kind}` }, h("h2", {}, title), h("div", { class: "value" }, value), h("div", { class: "note" }, note));
  const rest = elsewhere ? h("div", { class: "note" }, "Partitions of other nodes are not counted here. ", h("a", { href: "#/cluster" }, "The whole cluster")) : closed.length > 0 && h("div", { class: "note" }, `${counted(closed.length, "topic")} not open yet, so not counted. `, closed.length <= 100 && button(closed.length === 1 ? "Open it" : "Open them", () => openTopics(closed), { kind: "link" }));
  let first;
  if (!server.has_store) {
    first = card("If this disk died now", topics.length ? "everything would be lost" : "nothing to lose yet", ["There is no object store: ", bytes(sum((one) => one.hotBytes)), " are on this disk only. Serve with --store URL to keep history elsewhere.", rest], topics.length ? "bad wide" : "wide");
  } else if (unshipped === 0) {
    first = card("If this disk died now", "nothing would be lost", ["Every message of the open topics is in the store.", rest], "good wide");
  } else {
    const worst = [...behind].sort((a, b) => b[1].unshipped - a[1].unshipped)[0];
    first = card(
      "If this disk died now",
      `${counted(unshipped, "message")} would be lost`,
      [`${bytes(sum((one) => one.unshippedBytes))} in ${counted(behind.length, "topic")}, the oldest ${duration(oldest)} old; most in `, h("a", { href: topicLink(worst[0].name) }, worst[0].name), ". ", rest],
      "warn wide",
    );
  }
  return [
    first,
    card("Coming in", into.length ? rate(into.reduce((a, b) => a + b, 0)) : "–", `${count(sum((one) => one.messages))} messages, ${bytes(sum((one) => one.hotBytes))} on this disk`),
    h("div", { class: "card" }, h("h2", {}, server.has_store ? "Not shipped, over time" : "This server"), server.has_store ? chart(samplesOf("unshipped"), { label: "messages that are not shipped" }) : [h("div", { class: "value" }, server.version), h("div", { class: "note" }, `node ${server.node.slice(0, 12) || "local"}, Kafka at ${server.kafka}`)]),
  ];
}

export function createTopic() {
  const name = h("input", { type: "text", placeholder: "shop/orders", required: true, spellcheck: "false", autocomplete: "off" });
  const partitions = h("input", { type: "number", min: 1, max: 10000, value: "1" });
  const settings = h("textarea", { rows: 4, spellcheck: "false", placeholder: '{"retention_seconds": 604800}' });
  dialog("Create a topic", [field("Name", name, "namespace/name; a name alone is in the namespace default"), field("Partitions", partitions), field("Settings", settings, "JSON; what is left out has the server's default")], {
    action: "Create",
    submit: async () => {
      const full = name.value.includes("/") ? name.value.trim() : `default/${name.value.trim()}`;
      const own = settings.value.trim() ? readJson(settings.value, "the settings") : {};
      await api("PUT", topicPath(full), { body: { partitions: Number(partitions.value) || 1, settings: own } });
      toast(`Created ${full}`);
      location.hash = topicLink(full);
    },
  });
}

/** The value of a JSON text; an error that names what it should be. */
export function readJson(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}
