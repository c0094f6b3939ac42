// Subscriptions and consumer groups: how far they are, how that changed, and where they go on.

import { api, get, subscriptionPath, topicPath } from "./api.js";
import { button, field, fill, h, select } from "./dom.js";
import { ago, count, localInput } from "./format.js";
import { topicLink } from "./overview.js";
import { isReadOnly, sample, samplesOf } from "./state.js";
import { chart, dialog, empty, sortedTable, toast } from "./widgets.js";

const REFRESH_SECONDS = 5;

/** The subscriptions of these topics in one table that sorts and refreshes; `ontopics` may name other topics each time. */
export function subscriptionsPart(context, topics, { withTopic = false } = {}) {
  const { signal } = context;
  const state = { rows: [], open: null, filter: "" };
  const below = h("div");
  const list = h("div");
  const filter = h("input", { type: "search", placeholder: "Filter groups", "aria-label": "Filter groups", "data-filter": true, oninput: () => draw() });
  const table = sortedTable({
    caption: "Subscriptions and consumer groups",
    sort: "name",
    onselect: (row) => {
      state.open = state.open === row.id ? null : row.id;
      draw();
    },
    empty: "No group has this in its name.",
    columns: [
      { key: "name", label: "Name", value: (row) => row.name, cell: (row) => h("button", { type: "button", class: "link", "aria-expanded": String(state.open === row.id), onclick: () => {
        state.open = state.open === row.id ? null : row.id;
        draw();
      } }, row.name) },
      withTopic && { key: "topic", label: "Topic", value: (row) => row.topic, cell: (row) => h("a", { href: topicLink(row.topic) }, row.topic) },
      { key: "kind", label: "Kind", value: (row) => row.kind },
      { key: "lag", label: "Lag", number: true, value: (row) => row.lag_messages, cell: (row) => h("span", { class: row.lag_messages ? "warn" : null }, count(row.lag_messages)) },
      { key: "trend", label: "Lag over time", class: "trend", cell: (row) => spark(samplesOf(row.id)) },
      { key: "consumers", label: "Consumers", number: true, value: (row) => row.consumers.length, cell: (row) => (row.kind === "group" ? "–" : row.consumers.length) },
      { key: "moved", label: "Moved", value: (row) => row.moved, cell: (row) => ago(row.moved) },
    ].filter(Boolean),
  });
  fill(list, h("p", { class: "muted" }, "Loading…"));

  function draw() {
    if (!state.rows.length) {
      fill(list, empty("No subscriptions", "Nobody has read here with a name. A subscription appears with its first consumer, a consumer group of Kafka with its first commit."));
      fill(below);
      return;
    }
    if (!list.contains(table.element)) fill(list, state.rows.length > 5 || withTopic ? h("div", { class: "bar" }, filter) : null, table.element);
    table.update(state.rows.filter((one) => `${one.name} ${one.topic}`.toLowerCase().includes(filter.value.toLowerCase())));
    const row = state.rows.find((one) => one.id === state.open);
    fill(below, row && detail(row));
  }

  function detail(row) {
    const parts = sortedTable({
      caption: `Partitions of ${row.name}`,
      sort: "partition",
      columns: [
        { key: "partition", label: "Partition", number: true, value: (one) => one.partition },
        { key: "offset", label: "Continues at", number: true, value: (one) => one.offset, cell: (one) => count(one.offset) },
        { key: "above", label: "Acked beyond", number: true, value: (one) => one.acked_above, cell: (one) => count(one.acked_above) },
        { key: "end", label: "Ends at", number: true, value: (one) => one.end_offset, cell: (one) => count(one.end_offset) },
        { key: "lag", label: "Lag", number: true, value: (one) => one.lag_messages, cell: (one) => h("span", { class: one.lag_messages ? "warn" : null }, count(one.lag_messages)) },
      ],
    });
    parts.update(row.partitions);
    return h(
      "section",
      { class: "panel", "aria-label": row.name },
      h("div", { class: "title" }, h("h2", {}, row.name), !isReadOnly() && h("div", { class: "row" }, button("Reset offsets…", () => reset(row), { kind: "primary" }), row.kind !== "group" && button("Delete…", () => remove(row), { kind: "danger" }))),
      h("p", { class: "muted" }, row.consumers.length ? `Consumers: ${row.consumers.join(", ")}` : row.kind === "group" ? "A consumer group of Kafka's protocol: these are the offsets that it has committed." : "No consumer is connected."),
      h("div", { class: "split" }, parts.element, h("div", {}, h("h3", {}, "Lag over time"), chart(samplesOf(row.id), { label: `lag of ${row.name}`, height: 110 }))),
    );
  }

  function reset(row) {
    const inputs = row.partitions.map((one) => [one, h("input", { type: "number", min: 0, value: String(one.offset), "aria-label": `Offset in partition ${one.partition}` })]);
    const time = h("input", { type: "datetime-local", step: 1, value: localInput(new Date(Date.now() - 3600e3)), "aria-label": "Time" });
    const place = h("div");
    const how = select([["offsets", "offsets"], ["earliest", "the beginning"], ["latest", "the end"], ["time", "a time"]], "offsets", { "aria-label": "Continue at", onchange: () => show() });
    const show = () => fill(place, how.value === "offsets" ? inputs.map(([one, input]) => field(`Partition ${one.partition}`, input, `is at ${count(one.offset)}, ends at ${count(one.end_offset)}`)) : how.value === "time" ? field("Time", time, "In this computer's time zone. Finding it may read the store's catalog.") : null);
    show();
    dialog(`Reset ${row.name}`, [h("p", {}, row.kind === "group" ? "The group continues there. It must have no members while it is moved." : "Delivery goes on there, and earlier messages count as acknowledged. Consumers stay connected, and lose what they hold now."), field("Continue at", how), place], {
      action: "Reset",
      submit: async () => {
        const body = how.value === "offsets" ? { offsets: Object.fromEntries(inputs.map(([one, input]) => [one.partition, Number(input.value)])) } : { position: how.value === "time" ? new Date(time.value).toISOString() : how.value };
        await api("POST", subscriptionPath(row.topic, row.name, "seek"), { body });
        toast(`${row.name} was moved`);
        await refresh();
      },
    });
  }

  function remove(row) {
    dialog(`Delete ${row.name}`, h("p", {}, "Forgets the subscription and how far it is. The messages stay."), {
      action: "Delete",
      kind: "danger",
      confirm: row.name,
      submit: async () => {
        await api("DELETE", subscriptionPath(row.topic, row.name));
        toast(`Deleted ${row.name}`);
        state.open = null;
        await refresh();
      },
    });
  }

  async function refresh() {
    const names = typeof topics === "function" ? await topics() : topics;
    const rows = [];
    for (const topic of names) {
      const found = await get(topicPath(topic, "subscriptions"), {}, signal);
      for (const one of found.subscriptions) rows.push({ ...one, topic, id: `lag ${topic} ${one.kind === "group"} ${one.name}` });
    }
    for (const one of rows) sample(one.id, one.lag_messages);
    context.worked();
    state.rows = rows;
    draw();
  }

  context.main.addEventListener("escape", () => {
    state.open = null;
    draw();
  }, { signal });
  context.every(REFRESH_SECONDS, refresh);
  return h("div", {}, list, below);
}

function spark(points) {
  if (points.length < 2) return h("span", { class: "muted small" }, "…");
  return chart(points, { label: "lag", height: 34 });
}
