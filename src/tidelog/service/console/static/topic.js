// One topic: where its messages are, what they hold, who reads it, its settings.

import { api, get, topicPath } from "./api.js";
import { button, field, fill, h } from "./dom.js";
import { bytes, count, counted, duration, rate } from "./format.js";
import { deadLetters } from "./letters.js";
import { messagesPart } from "./messages.js";
import { readJson, topicLink } from "./overview.js";
import { produceDialog } from "./produce.js";
import { isReadOnly, rateOf, sample, samplesOf } from "./state.js";
import { subscriptionsPart } from "./subscriptions.js";
import { chart, dialog, sortedTable, strip, stripLegend, tabs, tell, toast } from "./widgets.js";
import { upkeepActions } from "./work.js";

const REFRESH_SECONDS = 3;
const STRIPS = 8;

export async function topic(context, namespace, ...rest) {
  const { main, signal, server } = context;
  const name = `${namespace}/${rest[0]}`;
  const tab = rest[1] || "messages";
  document.title = `${name} – tidelog`;
  const description = await get(topicPath(name), {}, signal);
  const where = h("section", { "aria-label": "Where the messages are" });
  const facts = h("dl", { class: "facts" });
  const part = h("div", { class: "part" });
  const state = { refresh: null };
  const entries = [["messages", "Messages"], ["partitions", "Partitions"], ["subscriptions", "Subscriptions"], ["letters", "Dead letters"], ["settings", "Settings"]];

  fill(
    main,
    h("div", { class: "title" }, h("h1", { class: "long" }, h("span", { class: "muted" }, `${namespace}/`), rest[0]), !isReadOnly() && actions()),
    where,
    facts,
    tabs(entries.map(([key, label]) => [key, label, topicLink(name, ...(key === "messages" ? [] : [key]))]), tab),
    part,
  );

  function actions() {
    return h(
      "div",
      { class: "row" },
      button("Produce…", () => produceDialog(name, description, null, () => state.refresh?.()), { kind: "primary" }),
      upkeepActions(context, `topic:${name}`, topicPath(name), server.has_store),
      button("Purge…", purge),
      button("Delete…", remove, { kind: "danger" }),
    );
  }

  function purge() {
    const inputs = description.partitions.map((one) => [one, h("input", { type: "number", min: one.start_offset, max: one.next_offset, value: String(one.next_offset), "aria-label": `First offset that stays in partition ${one.partition}` })]);
    dialog(`Purge ${name}`, [
      h("p", {}, "Deletes messages for good, from this disk and from the store. The topic, its settings and its offsets go on."),
      h("p", { class: "label" }, "The first offset that stays; prefilled, everything that is there now is deleted."),
      inputs.map(([one, input]) => field(description.partitions.length > 1 ? `Partition ${one.partition}` : "Offset", input, `holds ${count(one.start_offset)} up to ${count(one.next_offset)}`)),
    ], {
      action: "Purge",
      kind: "danger",
      confirm: name,
      submit: async () => {
        const offsets = Object.fromEntries(inputs.map(([one, input]) => [one.partition, Number(input.value)]));
        await api("POST", topicPath(name, "purge"), { body: { before: offsets } });
        toast(`Purged ${name}`);
        await refresh();
        state.refresh?.();
      },
    });
  }

  function remove() {
    dialog(`Delete ${name}`, h("p", {}, "Deletes the topic with everything in it, its subscriptions and its settings, for good, from this disk and from the store."), {
      action: "Delete for good",
      kind: "danger",
      confirm: name,
      submit: async () => {
        await api("DELETE", topicPath(name));
        toast(`Deleted ${name}`);
        location.hash = "#/";
      },
    });
  }

  function drawHead() {
    const parts = description.partitions;
    const sum = (pick) => parts.reduce((total, one) => total + pick(one), 0);
    const unshipped = sum((one) => Math.max(0, one.next_offset - Math.max(one.start_offset, one.shipped_offset)));
    const fact = (label, value, kind = "") => h("div", { class: kind }, h("dt", {}, label), h("dd", {}, value));
    const isElsewhere = parts.some((one) => one.node);
    const shown = parts.slice(0, STRIPS);
    fill(
      where,
      stripLegend(server.has_store),
      h("div", { class: "strips" }, shown.map((one) => (parts.length > 1 ? h("div", {}, h("div", { class: "strip-name" }, `partition ${one.partition}`), strip(one, server.has_store)) : strip(one, server.has_store)))),
      parts.length > STRIPS && h("p", { class: "muted" }, `The first ${STRIPS} of ${parts.length} partitions; all are in the tab Partitions.`),
    );
    fill(
      facts,
      fact("Messages", count(sum((one) => one.next_offset - one.start_offset))),
      fact("Rate", rate(rateOf(`next ${name}`))),
      fact(isElsewhere ? "On the disks of its nodes" : "On this disk", bytes(sum((one) => one.hot_bytes))),
      server.has_store
        ? fact(isElsewhere ? "Lost if those disks died now" : "Lost if this disk died now", unshipped ? `${counted(unshipped, "message")}, ${bytes(sum((one) => one.unshipped_bytes ?? 0))}, ${duration(Math.max(...parts.map((one) => one.unshipped_seconds ?? 0)))}` : "nothing", unshipped ? "warn" : "good")
        : fact("Lost if this disk died now", "everything: there is no object store", "warn"),
      fact("Owner", ownersOf(parts)),
    );
  }

  async function refresh() {
    const fresh = await get(topicPath(name), {}, signal);
    context.worked();
    Object.assign(description, fresh);
    sample(`next ${name}`, description.partitions.reduce((total, one) => total + one.next_offset, 0));
    sample(`unshipped ${name}`, description.partitions.reduce((total, one) => total + Math.max(0, one.next_offset - one.shipped_offset), 0));
    drawHead();
    state.redraw?.();
  }

  drawHead();
  if (tab === "messages") {
    const shown = messagesPart(context, name, description);
    state.refresh = shown.refresh;
    fill(part, shown.element);
  } else if (tab === "partitions") {
    const shown = partitionsPart(name, description, server);
    state.redraw = shown.redraw;
    fill(part, shown.element);
  } else if (tab === "subscriptions") fill(part, subscriptionsPart(context, [name]));
  else if (tab === "letters") fill(part, deadLetters(context, name));
  else if (tab === "settings") fill(part, settingsPart(name, description, () => refresh()));
  context.every(REFRESH_SECONDS, refresh);
}

/** Who serves a partition: this node where no other is named. */
const nodeOf = (one) => (one.node === "" ? "nobody" : one.node || "this node");

function ownersOf(parts) {
  const epochs = [...new Set(parts.map((one) => one.epoch))].filter((one) => one > 0);
  const nodes = [...new Set(parts.map(nodeOf))].join(", ");
  return epochs.length && epochs.length <= 3 ? `${nodes}, epoch ${epochs.join(", ")}` : nodes;
}

function partitionsPart(name, description, server) {
  const columns = [
    { key: "partition", label: "Partition", number: true, value: (row) => row.partition },
    { key: "start", label: "Begins", number: true, value: (row) => row.start_offset, cell: (row) => count(row.start_offset) },
    { key: "hot", label: "Disk from", number: true, value: (row) => row.hot_start_offset, cell: (row) => count(row.hot_start_offset) },
    { key: "shipped", label: "Shipped to", number: true, value: (row) => row.shipped_offset, cell: (row) => (server.has_store ? count(row.shipped_offset) : "–") },
    { key: "durable", label: "Synced to", number: true, value: (row) => row.durable_offset, cell: (row) => count(row.durable_offset) },
    { key: "stable", label: "Committed to", number: true, value: (row) => row.last_stable_offset, cell: (row) => count(row.last_stable_offset) },
    { key: "next", label: "Next", number: true, value: (row) => row.next_offset, cell: (row) => count(row.next_offset) },
    { key: "bytes", label: "Disk", number: true, value: (row) => row.hot_bytes, cell: (row) => bytes(row.hot_bytes) },
    { key: "age", label: "Not shipped for", number: true, value: (row) => row.unshipped_seconds ?? -1, cell: (row) => (row.unshipped_bytes ? duration(row.unshipped_seconds) : "–") },
    { key: "epoch", label: "Epoch", number: true, value: (row) => row.epoch, cell: (row) => (row.epoch > 0 ? row.epoch : "–") },
    ...(description.is_placed ? [{ key: "node", label: "Owner", value: nodeOf }] : []),
  ];
  const table = sortedTable({ caption: "Partitions", sort: "partition", columns });
  const line = h("div");
  const grow = !isReadOnly() && button("Add partitions…", () => {
    const input = h("input", { type: "number", min: description.partitions.length, max: 10000, value: String(description.partitions.length) });
    dialog("Add partitions", [field("Partitions", input, "More than now, never fewer. Keys go to other partitions from then on.")], {
      action: "Add",
      submit: async () => {
        Object.assign(description, await api("PATCH", topicPath(name), { body: { partitions: Number(input.value) } }));
        table.update(description.partitions);
      },
    });
  });
  const redraw = () => {
    table.update(description.partitions);
    fill(line, server.has_store && [h("h2", {}, "Not shipped, over time"), chart(samplesOf(`unshipped ${name}`), { label: "messages that are not shipped", height: 90 })]);
  };
  redraw();
  return { element: h("div", {}, table.element, h("div", { class: "row" }, grow), line), redraw };
}

function settingsPart(name, description, changed) {
  const filter = h("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", "data-filter": true, oninput: () => draw() });
  const text = (value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const table = sortedTable({
    caption: "Settings",
    sort: "name",
    empty: "No setting has this in its name.",
    columns: [
      { key: "name", label: "Setting", value: (row) => row.name, cell: (row) => h("code", {}, row.name) },
      { key: "value", label: "Value", value: (row) => text(row.value), cell: (row) => h("span", { class: row.own ? "own" : null }, text(row.value)) },
      { key: "own", label: "From", value: (row) => (row.own ? 0 : 1), cell: (row) => (row.own ? "this topic" : "the server") },
      { key: "edit", label: "", cell: (row) => !isReadOnly() && h("div", { class: "row" }, button("Change…", () => edit(row), { kind: "quiet", "aria-label": `Change ${row.name}` }), row.own && button("Take back", () => save(row.name, null).catch(tell), { kind: "quiet", "aria-label": `Take ${row.name} back` })) },
    ],
  });

  async function save(setting, value) {
    Object.assign(description, await api("PATCH", topicPath(name), { body: { settings: { [setting]: value } } }));
    toast(`${setting} is ${text(description.effective_settings[setting] ?? null)} now`);
    draw();
    changed();
  }

  function edit(row) {
    const input = h("input", { type: "text", spellcheck: "false", value: JSON.stringify(row.value) });
    dialog(`Change ${row.name}`, [field("Value", input, 'JSON: a number, "text", true or false')], { submit: () => save(row.name, readJson(input.value, "the value")) });
  }

  function draw() {
    const all = { ...description.effective_settings, ...description.settings };
    const rows = Object.entries(all).filter(([key]) => key.includes(filter.value) && key !== "kafka_configs").map(([key, value]) => ({ name: key, value, own: key in description.settings }));
    table.update(rows);
  }

  draw();
  return h("div", {}, h("div", { class: "bar" }, filter), table.element);
}
