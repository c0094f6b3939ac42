// Upkeep: verify runs with their findings, plans of garbage to review and apply, shipping; and what became of each.

import { api, enginePath, get, topicPath } from "./api.js";
import { button, fill, h, select } from "./dom.js";
import { ago, bytes, count, counted, duration, moment } from "./format.js";
import { topicLink } from "./overview.js";
import { isReadOnly } from "./state.js";
import { dialog, empty, notice, problemNotice, sortedTable, tell } from "./widgets.js";

const REFRESH_SECONDS = 2;
const WORDS = {
  ship: "Ship",
  seal: "Seal",
  retention: "Apply retention",
  "plan-retention": "Plan: retention",
  verify: "Verify",
  checkpoint: "Checkpoint",
  rescue: "Rescue",
  compact: "Compact",
  "plan-orphans": "Plan: orphaned objects",
  "remove-orphans": "Remove orphaned objects",
  "plan-garbage": "Plan: garbage",
  "collect-garbage": "Collect garbage",
};
const word = (kind) => WORDS[kind] || kind;

/** What can be started for a topic or an engine: label, method, path below it, query. The store is read only by name. */
function actionsOf(subject, hasStore) {
  const isEngine = subject.startsWith("engine:");
  return [
    (hasStore || isEngine) && ["Ship now", "POST", "ship", {}],
    isEngine && ["Write a checkpoint", "POST", "checkpoint", {}],
    isEngine ? ["Verify: reads disk and store", "POST", "verify", {}] : ["Verify this disk", "POST", "verify", { cold: false }],
    !isEngine && hasStore && ["Verify disk and store: reads every object", "POST", "verify", { cold: true }],
    isEngine && ["Plan the collection of garbage", "GET", "garbage", {}],
    hasStore && ["Compact: merge small objects of the store", "POST", "compact", {}],
    !isEngine && hasStore && ["Plan the removal of orphaned objects", "GET", "orphans", {}],
    !isEngine && ["Plan what retention deletes", "GET", "retention", {}],
  ].filter(Boolean);
}

const pathOf = (subject) => {
  const [kind, ...name] = subject.split(":");
  return kind === "engine" ? enginePath(name.join(":")) : topicPath(name.join(":"));
};

async function start(method, path, query) {
  const operation = await api(method, path, { query });
  location.hash = `#/upkeep/${operation.id}`;
}

/** A menu of what can be done for one topic or engine. */
export function upkeepActions(context, subject, path, hasStore) {
  const menu = h("details", { class: "menu" }, h("summary", {}, "Upkeep"), h("div", { class: "items" }, actionsOf(subject, hasStore).map(([label, method, below, query]) => button(label, () => start(method, `${path}/${below}`, query).catch(tell), { kind: "quiet" }))));
  document.addEventListener("click", (event) => !menu.contains(event.target) && menu.removeAttribute("open"), { signal: context.signal });
  context.main.addEventListener("escape", () => menu.removeAttribute("open"), { signal: context.signal });
  return menu;
}

export async function work(context, id) {
  if (id !== undefined) return operation(context, id);
  const { main, signal, server } = context;
  document.title = "Upkeep – tidelog";
  const list = h("div");
  const starter = h("div", { class: "bar" });
  const table = sortedTable({
    caption: "Operations",
    sort: "started",
    onselect: (row) => {
      location.hash = `#/upkeep/${row.id}`;
    },
    columns: [
      { key: "kind", label: "What", value: (row) => word(row.kind), cell: (row) => h("a", { href: `#/upkeep/${row.id}` }, word(row.kind)) },
      { key: "subject", label: "Of", value: (row) => row.subject, cell: (row) => subjectLink(row.subject) },
      { key: "state", label: "State", value: (row) => row.state, cell: (row) => badge(row) },
      { key: "started", label: "Started", value: (row) => -Date.parse(row.started), cell: (row) => ago(row.started) },
      { key: "took", label: "Took", number: true, value: (row) => took(row), cell: (row) => duration(took(row)) },
      { key: "by", label: "By", value: (row) => row.started_by },
    ],
  });
  fill(main, h("div", { class: "title" }, h("h1", {}, "Upkeep")), starter, list);
  if (!isReadOnly()) await drawStarter(context, starter, server);
  await context.every(REFRESH_SECONDS, async () => {
    const { operations } = await get("/v1/operations", {}, signal);
    context.worked();
    if (!operations.length) fill(list, empty("Nothing was started yet", "Verify runs, plans of garbage and shipping appear here, with what they found, until the server stops."));
    else {
      if (!list.contains(table.element)) fill(list, table.element);
      table.update(operations);
    }
  });
}

async function drawStarter(context, starter, server) {
  const [{ topics }, { engines }] = await Promise.all([get("/v1/topics", { limit: 1000 }, context.signal), get("/v1/engines", {}, context.signal)]);
  const subjects = [...topics.map((one) => `topic:${one.name}`), ...engines.map((one) => `engine:${one.name}`)];
  if (!subjects.length) return;
  const subject = select(subjects.map((one) => [one, one.replace(":", " ")]), subjects[0], { "aria-label": "Topic or engine", onchange: () => draw() });
  const action = h("select", { "aria-label": "What to do" });
  const draw = () => fill(action, actionsOf(subject.value, server.has_store).map(([label], at) => h("option", { value: String(at) }, label)));
  draw();
  fill(starter, subject, action, button("Start", () => {
    const [, method, below, query] = actionsOf(subject.value, server.has_store)[Number(action.value)];
    start(method, `${pathOf(subject.value)}/${below}`, query).catch(tell);
  }, { kind: "primary" }));
}

function subjectLink(subject) {
  const [kind, ...rest] = subject.split(":");
  const name = rest.join(":");
  return h("a", { href: kind === "engine" ? `#/engines/${encodeURIComponent(name)}` : topicLink(name) }, name);
}

const took = (row) => ((row.ended ? Date.parse(row.ended) : Date.now()) - Date.parse(row.started)) / 1000;

function badge(row) {
  if (row.state === "running") return h("span", { class: "badge" }, row.total > 1 ? `running, ${row.done} of ${row.total}` : "running");
  if (row.state === "failed") return h("span", { class: "badge bad" }, "failed");
  const isWrong = row.kind === "verify" && row.result && !row.result.ok;
  return h("span", { class: isWrong ? "badge bad" : "badge good" }, isWrong ? row.result.verdict : "done");
}

// One operation

async function operation(context, id) {
  const { main, signal } = context;
  const head = h("div");
  const body = h("div");
  fill(main, h("p", {}, h("a", { href: "#/upkeep" }, "All upkeep")), head, body);
  for (let isOver = false; !isOver && !signal.aborted; ) {
    const row = await get(`/v1/operations/${encodeURIComponent(id)}`, { wait: isOver === false && head.childElementCount ? 2 : 0 }, signal);
    document.title = `${word(row.kind)} – tidelog`;
    const fact = (label, text) => h("div", {}, h("dt", {}, label), h("dd", {}, text));
    fill(head, h("div", { class: "title" }, h("h1", {}, word(row.kind))), h("dl", { class: "facts" }, fact("Of", subjectLink(row.subject)), fact("State", badge(row)), fact("Started", `${moment(row.started)} by ${row.started_by}`), fact("Took", duration(took(row)))));
    isOver = row.ended !== null;
    if (isOver) fill(body, row.problem ? problemNotice({ message: row.problem.detail, hint: row.problem.hint }) : result(row));
    else fill(body, h("progress", { max: row.total, value: row.total > 1 ? row.done : null, "aria-label": "Progress" }));
  }
}

function result(row) {
  const found = row.result;
  if (row.kind === "verify") return verified(found);
  if (row.kind === "plan-orphans") return orphanPlan(row, Object.values(found.plans));
  if (row.kind === "remove-orphans") return removed(Object.values(found.reports));
  if (row.kind === "plan-garbage") return garbagePlan(row, found);
  if (row.kind === "plan-retention") return retentionPlan(row, Object.values(found.plans));
  return h("table", { class: "facts" }, h("tbody", {}, Object.entries(found || {}).map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key.replaceAll("_", " ")), h("td", {}, typeof value === "number" ? count(value) : typeof value === "object" && value !== null ? h("code", {}, JSON.stringify(value)) : String(value))))));
}

function verified(report) {
  const read = Object.entries(report.read).map(([what, number]) => (what === "bytes" || what.endsWith("_bytes") ? `${bytes(number)}${what === "bytes" ? "" : ` of ${what.replace("_bytes", "")}`}` : `${count(number)} ${what.replaceAll("_", " ")}`)).join(", ");
  const table = sortedTable({
    caption: "Findings",
    sort: "severity",
    columns: [
      { key: "severity", label: "Severity", value: (row) => row.severity, cell: (row) => h("span", { class: row.severity === "error" ? "badge bad" : "badge" }, row.severity) },
      { key: "kind", label: "Checked", value: (row) => row.kind },
      { key: "message", label: "What is wrong", value: (row) => row.message || "", cell: (row) => [row.message || "Administrators see what and where.", row.fix && h("div", { class: "hint" }, row.fix)] },
      { key: "offsets", label: "Concerns", value: (row) => row.first_offset ?? -1, cell: (row) => (row.first_offset === null ? "–" : `${row.unit}s ${count(row.first_offset)} to ${row.last_offset === null ? "the end" : count(row.last_offset)}`) },
      { key: "path", label: "Where", value: (row) => row.path || "", cell: (row) => h("code", { class: "long" }, row.path ? `${row.path}${(row.byte ?? null) === null ? "" : `, byte ${count(row.byte)}`}` : "–") },
    ],
  });
  table.update(report.findings);
  return [
    report.ok ? notice("good", h("strong", {}, "Nothing is wrong."), ` Read and checked: ${read || "nothing was there"}.`) : notice("bad", h("strong", {}, `${counted(report.findings.length, "finding")}: ${report.verdict}.`), ` Read and checked: ${read}.`),
    report.notes.length > 0 && h("ul", {}, report.notes.map((one) => h("li", {}, one))),
    !report.ok && table.element,
  ];
}

function candidates(found, caption) {
  const table = sortedTable({
    caption,
    sort: "action",
    columns: [
      { key: "action", label: "What happens", value: (row) => `${row.action === "remove" ? 0 : 1}${row.action}`, cell: (row) => h("span", { class: row.action === "remove" || row.action === "removed" ? "badge warn" : row.action === row.action.toUpperCase() ? "badge bad" : "badge" }, row.action) },
      { key: "kind", label: "Kind", value: (row) => row.kind },
      { key: "reason", label: "Reason", value: (row) => row.reason },
      { key: "bytes", label: "Size", number: true, value: (row) => row.bytes ?? 0, cell: (row) => (row.bytes === null ? "–" : bytes(row.bytes)) },
      { key: "key", label: "Object", value: (row) => row.key, cell: (row) => h("code", { class: "long" }, row.key) },
    ],
    empty: "Nothing was found.",
  });
  table.update(found);
  return table.element;
}

const sizeOf = (found) => found.reduce((total, one) => total + (one.bytes ?? 0), 0);

/** Applies a plan by its id: what was shown goes, or nothing if that has changed. */
function applyButton(row, below, text) {
  if (isReadOnly()) return null;
  const name = row.subject.split(":").slice(1).join(":");
  return button("Review done: apply…", () => dialog("Apply the plan", [h("p", {}, text), h("p", {}, "Exactly what is shown here is deleted. If some of it has changed since, the server says so and deletes nothing.")], { action: "Apply", kind: "danger", confirm: name, submit: () => start("POST", `${pathOf(row.subject)}/${below}`, { plan: row.id }) }), { kind: "danger" });
}

function orphanPlan(row, plans) {
  const found = plans.flatMap((one) => one.found);
  const going = found.filter((one) => one.action === "remove");
  return [
    going.length ? notice("warn", h("strong", {}, `${counted(going.length, "object")}, ${bytes(sizeOf(going))}, can go.`), " Nothing was changed yet.") : notice("good", "There is nothing to remove."),
    found.length > 0 && candidates(found, "What was found"),
    going.length > 0 && h("div", { class: "row" }, applyButton(row, "orphans/remove", `Removes ${counted(going.length, "object")}, ${bytes(sizeOf(going))}, from the store, for good.`)),
  ];
}

function retentionPlan(row, plans) {
  const total = (of) => plans.reduce((sum, one) => sum + of(one), 0);
  const messages = total((one) => one.delete_before - one.start_offset);
  const objects = total((one) => one.objects.length);
  const files = total((one) => one.file_bytes);
  const table = sortedTable({
    caption: "Partitions",
    sort: "partition",
    columns: [
      { key: "partition", label: "Partition", number: true, value: (one) => one.partition },
      { key: "messages", label: "Messages that go", number: true, value: (one) => one.delete_before - one.start_offset, cell: (one) => count(one.delete_before - one.start_offset) },
      { key: "start", label: "Begins then at", number: true, value: (one) => one.delete_before, cell: (one) => count(one.delete_before) },
      { key: "objects", label: "Objects", number: true, value: (one) => one.objects.length, cell: (one) => `${count(one.objects.length)}, ${bytes(one.object_bytes)}` },
      { key: "files", label: "Off this disk", number: true, value: (one) => one.file_bytes, cell: (one) => bytes(one.file_bytes) },
    ],
  });
  table.update(plans.map((one, partition) => ({ ...one, partition })));
  const isEmpty = !messages && !objects && !files;
  return [
    isEmpty ? notice("good", "Nothing is due.") : notice("warn", h("strong", {}, `${counted(messages, "message")} and ${bytes(files)} on this disk can go.`), " Nothing was changed yet."),
    table.element,
    !isEmpty && h("div", { class: "row" }, applyButton(row, "retention", `Deletes ${counted(messages, "message")} for good, and takes ${bytes(files)} off this disk.`)),
  ];
}

function removed(reports) {
  const gone = reports.flatMap((one) => one.removed);
  const kept = reports.flatMap((one) => one.kept);
  return [notice("good", h("strong", {}, `${counted(gone.length, "object")} removed, ${bytes(sizeOf(gone))} freed.`), kept.length ? ` ${counted(kept.length, "object")} stayed.` : ""), gone.length + kept.length > 0 && candidates([...gone.map((one) => ({ ...one, action: "removed" })), ...kept], "What became of it")];
}

function garbagePlan(row, plan) {
  const isEmpty = !plan.removable_versions && !plan.droppable_bytes;
  const fact = (label, text) => h("div", {}, h("dt", {}, label), h("dd", {}, text));
  const table = sortedTable({
    caption: "Pieces of the log",
    sort: "lsn",
    columns: [
      { key: "lsn", label: "From LSN", number: true, value: (one) => one.first_lsn, cell: (one) => count(one.first_lsn) },
      { key: "fate", label: "What happens", value: (one) => one.fate, cell: (one) => h("span", { class: one.fate === "drop" ? "badge warn" : "badge" }, one.fate) },
      { key: "size", label: "Size", number: true, value: (one) => one.size, cell: (one) => bytes(one.size) },
      { key: "live", label: "In use", number: true, value: (one) => one.live_bytes, cell: (one) => bytes(one.live_bytes) },
      { key: "dead", label: "Dead", number: true, value: (one) => one.dead_bytes, cell: (one) => bytes(one.dead_bytes) },
      { key: "name", label: "Name", value: (one) => one.name, cell: (one) => h("code", { class: "long" }, one.name) },
    ],
  });
  table.update(plan.pieces);
  return [
    isEmpty ? notice("good", "There is nothing to collect.") : notice("warn", h("strong", {}, `${counted(plan.removable_versions, "version")} and ${bytes(plan.droppable_bytes)} of log can go.`), " Nothing was changed yet."),
    plan.held_back_by && notice("", `Held back: ${plan.held_back_by}`),
    h("dl", { class: "facts" }, fact("Versions that stay", count(plan.versions)), fact("In use", bytes(plan.live_bytes)), fact("Dead", bytes(plan.dead_bytes)), fact("Readable from seq", count(plan.horizon_seq)), fact("Where", plan.place)),
    plan.pieces.length > 0 && table.element,
    !isEmpty && h("div", { class: "row" }, applyButton(row, "garbage/collect", `Removes ${counted(plan.removable_versions, "version")} and drops ${bytes(plan.droppable_bytes)} of the log, for good.`)),
  ];
}
