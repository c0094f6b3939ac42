// The cluster: its nodes, who serves what, what a lost disk would cost, and what was decided and why. What is asked for
// here is carried out by the leader; the page shows it when it is done.

import { api, get } from "./api.js";
import { button, field, fill, h, select } from "./dom.js";
import { bytes, count, counted, duration, moment, rate } from "./format.js";
import { topicLink } from "./overview.js";
import { isReadOnly, sample, samplesOf } from "./state.js";
import { chart, dialog, empty, sortedTable, tell, toast } from "./widgets.js";

const REFRESH_SECONDS = 3;
const DECISIONS = 100;
const ASKED_DECISIONS = 1000;
const KINDS = { alive: "good", gone: "bad", leaving: "warn", draining: "warn", drained: "warn" };
const NOBODY = "nobody";

const ask = (path, query, signal) => get(`/v1/cluster/${path}`, query, signal);

export async function cluster(context) {
  const { main, signal } = context;
  document.title = "Cluster – tidelog";
  const cards = h("section", { class: "cards", "aria-label": "The cluster in a few numbers" });
  const tables = { nodes: nodesTable(context), topics: topicsTable(), engines: enginesTable(), lost: lostTable(), decisions: decisionsTable() };
  const part = (title, note, table) => h("section", { "aria-label": title }, h("h2", {}, title), note && h("p", { class: "muted" }, note), table.element);
  const withSlots = h("input", { type: "checkbox", onchange: () => refresh().catch(tell) });
  const content = [
    cards,
    part("Nodes", null, tables.nodes),
    part("Topics", null, tables.topics),
    part("Engines", null, tables.engines),
    part("Restore point", "What is synced on the disk of one node and not shipped, as the nodes have reported it last. What a node that is gone had not shipped is missing until it comes back.", tables.lost),
    part("Decisions", [`The newest ${DECISIONS} of the leader. `, h("label", {}, withSlots, " with the slots of coordinators")], tables.decisions),
  ];
  const balance = !isReadOnly() && button("Balance…", () => balanceDialog(context), { kind: "primary" });
  const body = h("div", { class: "stack" });
  fill(main, h("div", { class: "title" }, h("h1", {}, "Cluster"), balance), body);

  async function refresh() {
    const [status, nodes, topics, engines, lost, decided] = await Promise.all([
      ask("status", {}, signal),
      ask("nodes", {}, signal),
      ask("topics", {}, signal),
      ask("engines", {}, signal),
      ask("restore-point", {}, signal),
      ask("decisions", { last: ASKED_DECISIONS, slots: true }, signal),
    ]);
    context.worked();
    sample("cluster unshipped", status.unshipped_messages);
    context.nodes = nodes.nodes;
    fill(cards, statusCards(status, nodes.nodes, lost.unshipped));
    tables.nodes.update(nodes.nodes.map((one) => ({ ...one, lost: summed(lost.unshipped.filter((each) => each.node === one.name && each.topic)) })));
    tables.topics.update(topics.topics.map((one) => ({ ...one, nodes: nodes.nodes, lost: summed(lost.unshipped.filter((each) => each.topic === one.name)) })));
    tables.engines.update(engines.engines.map((one) => ({ ...one, nodes: nodes.nodes })));
    tables.lost.update(lost.unshipped.map((one) => ({ ...one, id: `${one.node} ${one.topic || `engine ${one.engine}`}` })));
    tables.decisions.update(decided.decisions.filter((one) => withSlots.checked || one.kind !== "slot").slice(-DECISIONS).map((one, at) => ({ ...one, id: `${one.time} ${one.what}`, at })));
    if (!body.contains(cards)) fill(body, content);
  }

  await context.every(REFRESH_SECONDS, async () => {
    try {
      await refresh();
    } catch (error) {
      if (error.status !== 404) throw error;
      context.worked();
      fill(body, empty("This node is by itself", "Several nodes over one etcd and one bucket form a cluster: start them with --metadata etcd://HOST:PORT. `tidelog cluster dev` runs one on your machine."));
    }
  });
}

const summed = (rows) => rows.reduce((sum, one) => ({ messages: sum.messages + one.messages, bytes: sum.bytes + one.bytes, seconds: Math.max(sum.seconds, one.seconds) }), { messages: 0, bytes: 0, seconds: 0 });

function statusCards(status, nodes, lost) {
  const card = (title, value, note, kind = "") => h("div", { class: `card ${kind}` }, h("h2", {}, title), h("div", { class: "value" }, value), h("div", { class: "note" }, note));
  const left = summed(lost.filter((each) => !each.is_alive && each.topic));
  const gone = [...new Set(lost.filter((each) => !each.is_alive && each.topic).map((each) => each.node))].join(", ");
  const byNode = nodes.filter((one) => one.state !== "gone").map((one) => [one.name, summed(lost.filter((each) => each.node === one.name && each.topic))]);
  const [name, worst] = byNode.reduce((most, one) => (one[1].messages > most[1].messages ? one : most), ["", summed([])]);
  const entries = status.unshipped_entries ? ` Of engines ${count(status.unshipped_entries)} entries would be applied again.` : "";
  const missing = status.unassigned + status.unassigned_engines;
  const served = [counted(status.partitions, "partition"), `${counted(status.topics, "topic")}, ${counted(status.engines, "engine")} on ${counted(status.nodes, "node")}`];
  return [
    left.messages > 0 && card("Missing", counted(left.messages, "message"), `${bytes(left.bytes)} that ${gone} had not shipped: they are on its disk. Start it again, then rescue its tails.`, "bad"),
    worst.messages === 0
      ? card("If the disk of a node died now", "nothing would be lost", `Every message is in the store.${entries}`, "good wide")
      : card("If the disk of a node died now", `up to ${counted(worst.messages, "message")} would be lost`, `${bytes(worst.bytes)} on ${name}, the oldest ${duration(worst.seconds)} old; ${count(status.unshipped_messages)} messages on all nodes.${entries}`, "warn wide"),
    missing
      ? card("Nobody serves", `${counted(missing, status.unassigned_engines ? "piece" : "partition")}`, `of ${served.join(" of ")}`, "bad")
      : card("Served", served[0], `of ${served[1]}. ${status.moving ? `${count(status.moving)} are being opened. ` : ""}Led by ${status.leader || NOBODY}; imbalance ${Math.round(status.imbalance * 100)} % (${status.strategy})${status.requests ? `; ${counted(status.requests, "request")} under way` : ""}`),
    h("div", { class: "card" }, h("h2", {}, "Not shipped, over time"), chart(samplesOf("cluster unshipped"), { label: "messages that are not shipped" })),
  ];
}

// Tables

const lostCell = (one) => (one.messages ? h("span", { class: "warn", title: `${bytes(one.bytes)}, the oldest ${duration(one.seconds)} old` }, count(one.messages)) : "0");

function nodesTable(context) {
  const load = (row, pick) => (row.load ? pick(row.load) : null);
  const total = (row, name) => load(row, (one) => one.total?.[name] ?? 0);
  const number = (key, label, value, shown) => ({ key, label, number: true, value: (row) => value(row) ?? -1, cell: (row) => (value(row) === null ? "–" : shown(value(row))) });
  return sortedTable({
    caption: "Nodes",
    sort: "name",
    empty: "No node was ever here.",
    columns: [
      { key: "name", label: "Node", value: (row) => row.name, cell: (row) => [row.http ? h("a", { href: `${row.http}/#/cluster` }, row.name) : row.name, row.is_leader && h("span", { class: "badge" }, "leader")] },
      { key: "state", label: "State", value: (row) => row.state, cell: (row) => h("span", { class: `badge ${KINDS[row.state] || ""}` }, row.state) },
      { key: "zone", label: "Zone", value: (row) => row.zone || "–" },
      { key: "version", label: "Version", value: (row) => row.version || "–" },
      { key: "partitions", label: "Partitions", number: true, value: (row) => row.partitions, cell: (row) => [count(row.partitions), load(row, (one) => one.opening) ? h("span", { class: "muted small" }, ` ${count(row.load.opening)} opening`) : ""] },
      { key: "engines", label: "Engines", number: true, value: (row) => row.engines, cell: (row) => count(row.engines) },
      number("in", "In", (row) => total(row, "bytes_in"), (value) => `${bytes(value)}/s`),
      number("out", "Out", (row) => total(row, "bytes_out"), (value) => `${bytes(value)}/s`),
      number("messages", "Messages in", (row) => total(row, "messages_in"), rate),
      number("cpu", "Cores", (row) => load(row, (one) => one.cpu ?? 0), (value) => value.toFixed(2)),
      number("memory", "Memory", (row) => load(row, (one) => one.memory_bytes ?? 0), bytes),
      number("disk", "Disk free", (row) => load(row, (one) => one.disk_free_bytes ?? 0), bytes),
      { key: "lost", label: "Not shipped", number: true, value: (row) => row.lost.messages, cell: (row) => lostCell(row.lost) },
      ...(isReadOnly() ? [] : [{ key: "act", label: "", cell: (row) => drainButton(context, row) }]),
    ],
  });
}

const isDrained = (row) => row.state === "drained" || row.state === "draining";

function drainButton(context, row) {
  if (isDrained(row)) return button("Undrain", () => change(context, "undrain", { node: row.name }, `${row.name} may serve again; balance gives it partitions.`), { kind: "quiet" });
  if (row.state !== "alive") return "";
  return button("Drain…", () => drainDialog(context, row), { kind: "quiet" });
}

/** The node of each partition as words: `n1 4, n2 3`. */
function owners(row) {
  const counts = new Map();
  for (const node of row.partitions) counts.set(node ?? NOBODY, (counts.get(node ?? NOBODY) || 0) + 1);
  return [...counts].sort();
}

function topicsTable() {
  return sortedTable({
    caption: "Topics",
    sort: "name",
    onselect: topicDialog,
    empty: "No topics yet.",
    columns: [
      { key: "name", label: "Topic", class: "name", value: (row) => row.name, cell: (row) => h("a", { href: topicLink(row.name) }, row.name) },
      { key: "partitions", label: "Partitions", number: true, value: (row) => row.partitions.length, cell: (row) => h("button", { type: "button", class: "link", title: "Who serves each", onclick: () => topicDialog(row) }, count(row.partitions.length)) },
      { key: "owners", label: "Owners", value: (row) => owners(row).join(), cell: (row) => owners(row).map(([node, number]) => h("span", { class: node === NOBODY ? "badge bad" : "badge" }, `${node} ${count(number)}`)) },
      { key: "pins", label: "Pinned", number: true, value: (row) => Object.keys(row.pins).length, cell: (row) => count(Object.keys(row.pins).length) },
      { key: "lost", label: "Not shipped", number: true, value: (row) => row.lost.messages, cell: (row) => lostCell(row.lost) },
    ],
  });
}

function enginesTable() {
  return sortedTable({
    caption: "Engines",
    sort: "name",
    empty: "The cluster serves no engine. `tidelog cluster add-engine` has it serve one.",
    columns: [
      { key: "name", label: "Engine", class: "name", value: (row) => row.name, cell: (row) => h("a", { href: `#/engines/${encodeURIComponent(row.name)}` }, row.name) },
      { key: "node", label: "Owner", value: (row) => row.node ?? NOBODY, cell: (row) => h("span", { class: row.node ? "badge" : "badge bad" }, row.node ?? NOBODY) },
      { key: "state", label: "State", value: (row) => row.state, cell: (row) => h("span", { class: row.state === "failing" ? "badge bad" : "", title: row.reason ?? "" }, row.state) },
      { key: "pin", label: "Pinned to", value: (row) => row.pin ?? "–" },
      { key: "store", label: "Store", value: (row) => row.store ?? "of the cluster" },
      { key: "lost", label: "Entries not shipped", number: true, value: (row) => row.unshipped, cell: (row) => count(row.unshipped) },
      ...(isReadOnly() ? [] : [{ key: "act", label: "", cell: (row) => button("Move…", () => engineDialog(row), { kind: "quiet" }) }]),
    ],
  });
}

function lostTable() {
  return sortedTable({
    caption: "Restore point",
    sort: "node",
    empty: "Everything is in the store.",
    columns: [
      { key: "node", label: "Node", value: (row) => row.node, cell: (row) => [row.node, !row.is_alive && h("span", { class: "badge bad", title: `reported ${moment(row.reported)}` }, "gone")] },
      { key: "what", label: "Of", class: "name", value: (row) => row.topic || `engine ${row.engine}`, cell: (row) => (row.topic ? h("a", { href: topicLink(row.topic) }, row.topic) : `engine ${row.engine}, applied again by its orchestrator`) },
      { key: "messages", label: "Messages", number: true, value: (row) => row.messages, cell: (row) => count(row.messages) },
      { key: "bytes", label: "Bytes", number: true, value: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
      { key: "seconds", label: "Oldest", number: true, value: (row) => row.seconds, cell: (row) => duration(row.seconds) },
    ],
  });
}

function decisionsTable() {
  return sortedTable({
    caption: "Decisions",
    sort: "time",
    descending: true,
    empty: "Nothing was decided yet.",
    columns: [
      { key: "time", label: "Time", value: (row) => row.at, cell: (row) => moment(row.time) },
      { key: "kind", label: "Kind", value: (row) => row.kind },
      { key: "what", label: "What", class: "name", value: (row) => row.what },
      { key: "from", label: "From", value: (row) => row.from ?? "–" },
      { key: "to", label: "To", value: (row) => row.to },
      { key: "reason", label: "Reason", value: (row) => row.reason },
      { key: "leader", label: "Decided by", value: (row) => row.leader ?? "–" },
    ],
  });
}

// What can be asked for

async function change(context, path, body, said) {
  try {
    await api("POST", `/v1/cluster/${path}`, { body, signal: context.signal });
    toast(said);
  } catch (error) {
    tell(error);
  }
}

/** What the leader would decide, as a list; it may be long. */
function planned(decisions) {
  if (!decisions.length) return h("p", {}, "Nothing would be moved.");
  const some = decisions.slice(0, 20).map((one) => h("li", {}, `${one.what} from ${one.from ?? NOBODY} to ${one.to}: ${one.reason}`));
  return [h("p", {}, `${counted(decisions.length, "piece")} would be moved:`), h("ul", {}, some, decisions.length > 20 && h("li", {}, `and ${count(decisions.length - 20)} more`))];
}

async function drainDialog(context, row) {
  try {
    const { decisions } = await ask("plan", { drain: row.name }, context.signal);
    const moved = decisions.filter((one) => one.from === row.name);
    dialog(`Drain ${row.name}`, [h("p", {}, "Moves everything off the node and keeps it empty, for maintenance. Clients see a pause, and no errors."), planned(moved)], {
      action: "Drain",
      submit: () => api("POST", "/v1/cluster/drain", { body: { node: row.name } }),
    });
  } catch (error) {
    tell(error);
  }
}

async function balanceDialog(context) {
  try {
    const { decisions } = await ask("plan", { balance: true }, context.signal);
    dialog("Balance now", planned(decisions), { action: "Balance", submit: () => api("POST", "/v1/cluster/balance") });
  } catch (error) {
    tell(error);
  }
}

const targets = (nodes, but) => nodes.filter((one) => one.state === "alive" && one.name !== but).map((one) => one.name);

function moveForm(row, body, but, before = []) {
  const names = targets(row.nodes, but);
  const node = select(names, names[0], { "aria-label": "To" });
  const pin = h("input", { type: "checkbox" });
  return {
    fields: names.length ? [...before, field("To", node), h("label", { class: "row" }, pin, "Keep it there, whatever the balance says")] : [h("p", {}, "There is no other node that is alive.")],
    submit: async () => {
      const { is_done: isDone } = await api("POST", "/v1/cluster/move", { query: { wait: 10 }, body: { ...body(), node: node.value, pin: pin.checked } });
      toast(isDone ? `It is assigned to ${node.value}.` : "The leader carries it out.");
    },
    canMove: names.length > 0,
  };
}

function engineDialog(row) {
  const form = moveForm(row, () => ({ engine: row.name }), row.node);
  dialog(`Move the engine ${row.name}`, [h("p", {}, "The old node ships what is committed and closes it, the new one restores it from the store."), form.fields], form.canMove ? { action: "Move", submit: form.submit } : {});
}

/** Numbers as ranges: `0–3, 7`. */
function ranges(numbers) {
  const found = [];
  for (const one of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === one - 1) last[1] = one;
    else found.push([one, one]);
  }
  return found.map(([first, last]) => (first === last ? count(first) : `${count(first)}–${count(last)}`)).join(", ");
}

function topicDialog(row) {
  const of = (name) => row.partitions.map((node, number) => [node ?? NOBODY, number]).filter(([node]) => node === name).map(([, number]) => number);
  const facts = owners(row).map(([node]) => h("tr", {}, h("th", {}, node), h("td", {}, ranges(of(node)))));
  const pins = Object.entries(row.pins).map(([number, node]) => `${number} to ${node}`).join(", ");
  const table = [h("table", { class: "facts" }, h("tbody", {}, facts)), pins && h("p", { class: "muted" }, `Pinned: ${pins}`)];
  if (isReadOnly()) {
    dialog(row.name, table);
    return;
  }
  const number = h("input", { type: "number", min: 0, max: row.partitions.length - 1, value: "0" });
  const form = moveForm(row, () => ({ topic: row.name, partition: Number(number.value) }), null, [field("Move partition", number)]);
  dialog(row.name, [table, form.fields], form.canMove ? { action: "Move", submit: form.submit } : {});
}
