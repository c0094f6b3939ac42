// Engines: their marks on one time line, and their state as of any seq.
//
// Lists come from the index on the server's disk. The value of an object is read when a person opens it.

import { bytesAt, enginePath, get } from "./api.js";
import { button, fill, h, svg } from "./dom.js";
import { bytes, count, counted, hexDump, short, textOf } from "./format.js";
import { isReadOnly, sample, samplesOf } from "./state.js";
import { chart, empty, notice, problemNotice, sortedTable } from "./widgets.js";
import { upkeepActions } from "./work.js";

const REFRESH_SECONDS = 3;
const PAGE = 200;
const NEAR = 6;
const engineLink = (name) => `#/engines/${encodeURIComponent(name)}`;

export async function engines(context, name) {
  if (name !== undefined) return engine(context, name);
  const { main, signal } = context;
  document.title = "Engines – tidelog";
  const list = h("div");
  const others = h("p", { class: "muted" });
  const table = sortedTable({
    caption: "Engines",
    sort: "name",
    empty: "This node serves none.",
    onselect: (row) => {
      location.hash = engineLink(row.name);
    },
    columns: [
      { key: "name", label: "Engine", value: (row) => row.name, cell: (row) => h("a", { href: engineLink(row.name) }, row.name) },
      { key: "line", label: "Marks", class: "where", cell: (row) => timeLine(row, {}) },
      { key: "applied", label: "Applied", number: true, value: (row) => row.applied_seq, cell: (row) => count(row.applied_seq) },
      { key: "low", label: "Committed", number: true, value: (row) => row.low_water_mark, cell: (row) => count(row.low_water_mark) },
      { key: "high", label: "In the store", number: true, value: (row) => row.high_water_mark, cell: (row) => count(row.high_water_mark) },
      { key: "truncate", label: "Log may be cut to", number: true, value: (row) => row.truncation_mark, cell: (row) => count(row.truncation_mark) },
    ],
  });
  fill(main, h("div", { class: "title" }, h("h1", {}, "Engines")), list);
  await context.every(REFRESH_SECONDS, async () => {
    const found = await get("/v1/engines", {}, signal);
    context.worked();
    const elsewhere = found.elsewhere || [];
    if (!found.engines.length && !elsewhere.length) fill(list, empty("No engines are served", "Start the server with --engine NAME=DIR, or add one to a cluster, to see its marks and its state as of any seq."));
    else {
      if (!list.contains(table.element)) fill(list, legend(), table.element, others);
      fill(others, elsewhere.length > 0 && [`${counted(elsewhere.length, "engine")} on other nodes: `, elsewhere.map((one, at) => [at > 0 && ", ", h("a", { href: engineLink(one.name) }, one.name), ` (${one.node ?? "nobody serves it"})`])]);
      table.update(found.engines);
    }
  });
}

function legend() {
  const entry = (kind, text) => h("span", { class: "entry" }, h("span", { class: `swatch ${kind}` }), text);
  return h("div", { class: "legend" }, entry("cold", "in the store (high-water mark)"), entry("hot", "committed, on this disk (low-water mark)"), entry("open", "applied, may be rolled back"));
}

/** The marks of an engine on one line from its first readable seq to the last applied one. */
function timeLine(engine, { seq = null, first = 0, versions = [], width = 600 }) {
  const height = seq === null ? 14 : 46;
  const end = Math.max(1, engine.applied_seq, first + 1);
  const x = (value) => (width * (Math.min(Math.max(value, first), end) - first)) / (end - first);
  const bar = (kind, from, to) => to > from && svg("rect", { class: kind, x: x(from), width: Math.max(1, x(to) - x(from)), y: 2, height: 10, rx: 2 });
  const parts = [
    svg("rect", { class: "track", x: 0, width, y: 2, height: 10, rx: 2 }),
    bar("cold", first, engine.high_water_mark),
    bar("hot", Math.max(first, engine.high_water_mark), engine.low_water_mark),
    bar("risk", Math.max(first, engine.low_water_mark), engine.applied_seq),
  ];
  if (seq !== null) {
    for (const one of versions) parts.push(svg("circle", { class: one.is_deleted ? "version gone" : "version", cx: x(one.seq), cy: 24, r: 3 }, svg("title", {}, `${one.is_deleted ? "deleted" : "written"} at ${count(one.seq)}`)));
    parts.push(svg("line", { class: "now", x1: x(seq), x2: x(seq), y1: 0, y2: 31 }));
    const anchor = x(seq) < 60 ? "start" : x(seq) > width - 60 ? "end" : "middle";
    parts.push(svg("text", { x: x(seq), y: 44, "text-anchor": anchor }, `as of ${count(seq)}`));
  }
  const words = `applied ${engine.applied_seq}, committed ${engine.low_water_mark}, in the store ${engine.high_water_mark}`;
  return svg("svg", { class: "timeline", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, preserveAspectRatio: seq === null ? "none" : null }, parts.filter(Boolean));
}

/** Some of the versions, around the one that a seq sees; they come newest first. */
function nearest(versions, seq) {
  const at = Math.max(0, versions.findIndex((one) => one.seq <= seq));
  return versions.slice(Math.max(0, at - NEAR), at + NEAR + 1);
}

async function engine(context, name) {
  const { main, signal, server } = context;
  document.title = `${name} – tidelog`;
  let description = await get(enginePath(name), {}, signal);
  const state = { seq: null, bucket: null, prefix: "", key: null, versions: [] };
  const facts = h("dl", { class: "facts" });
  const line = h("div", { class: "travel-line" });
  const slider = h("input", { type: "range", min: 1, step: 1, "aria-label": "As of seq", oninput: () => travel(Number(slider.value)) });
  const typed = h("input", { type: "number", min: 1, "aria-label": "Seq", onchange: () => travel(Number(typed.value)) });
  const newest = button("Now", () => travel(null));
  const objects = h("div");
  const value = h("div");
  let waiting = 0;
  let turn = 0;

  const first = () => Math.max(1, description.statistics.history_start_seq || 1);
  const seq = () => state.seq ?? description.applied_seq;

  function travel(to) {
    state.seq = to === null || to >= description.applied_seq ? null : Math.max(first(), to);
    drawLine();
    clearTimeout(waiting);
    waiting = setTimeout(() => load(), 150);
  }

  function drawLine() {
    slider.min = first();
    slider.max = Math.max(first(), description.applied_seq);
    slider.value = seq();
    slider.disabled = description.applied_seq === 0;
    if (document.activeElement !== typed) typed.value = seq();
    newest.disabled = state.seq === null;
    fill(line, timeLine(description, { seq: seq(), first: first() - 1, versions: state.versions, width: Math.max(300, line.clientWidth) }));
    const statistics = description.statistics;
    const fact = (label, text) => h("div", {}, h("dt", {}, label), h("dd", {}, text));
    fill(facts, fact("Applied", count(description.applied_seq)), fact("Committed (low-water mark)", count(description.low_water_mark)), fact("In the store (high-water mark)", count(description.high_water_mark)), fact("Log may be cut to", count(description.truncation_mark)), fact("History begins at", count(first())), fact("On this disk", bytes(statistics.hot_tier_bytes + statistics.index_bytes)));
  }

  /** What is shown, as of the chosen seq; what a later choice has overtaken is dropped. */
  async function load() {
    const mine = (turn += 1);
    try {
      if (description.applied_seq === 0) {
        fill(objects, empty("Nothing was applied yet", "Entries appear here once the orchestrator has applied some."));
        return;
      }
      const { buckets } = await get(enginePath(name, "buckets"), { seq: seq() }, signal);
      if (mine !== turn) return;
      const chosen = buckets.includes(state.bucket) ? state.bucket : buckets[0];
      state.bucket ??= chosen ?? null;
      const picks = buckets.map((one) => button(one, () => {
        Object.assign(state, { bucket: one, prefix: "", key: null, versions: [] });
        load();
      }, { "aria-pressed": String(one === chosen), kind: one === chosen ? "chip on" : "chip" }));
      if (chosen === undefined) {
        fill(objects, empty("No buckets", `There was no bucket as of ${count(seq())}.`));
        fill(value);
        return;
      }
      const found = await get(enginePath(name, "buckets", encodeURIComponent(chosen), "objects"), { seq: seq(), prefix: state.prefix, limit: PAGE }, signal);
      if (mine !== turn) return;
      drawObjects(picks, chosen, found);
      if (state.key !== null) await openObject(chosen, state.key, mine);
      else fill(value);
      context.worked();
    } catch (error) {
      if (!signal.aborted && mine === turn) fill(objects, problemNotice(error));
    }
  }

  const prefix = h("input", { type: "search", placeholder: "Keys that begin with", "aria-label": "Keys that begin with", "data-filter": true, oninput: () => {
    state.prefix = prefix.value;
    clearTimeout(waiting);
    waiting = setTimeout(() => load(), 200);
  } });
  const table = sortedTable({
    caption: "Objects",
    sort: "key",
    onselect: (row) => openObject(state.bucket, row.key, (turn += 1)),
    empty: "No object here at this seq.",
    columns: [
      { key: "key", label: "Key", value: (row) => row.key, class: "name", cell: (row) => h("button", { type: "button", class: "link", onclick: () => openObject(state.bucket, row.key, (turn += 1)) }, row.key) },
      { key: "size", label: "Size", number: true, value: (row) => row.size, cell: (row) => bytes(row.size) },
      { key: "seq", label: "Written at", number: true, value: (row) => row.seq, cell: (row) => count(row.seq) },
    ],
  });
  const picked = h("div", { class: "row" });
  const said = h("p", { class: "muted" });

  function drawObjects(picks, bucket, found) {
    state.bucket = bucket;
    fill(picked, h("span", { class: "muted" }, "Bucket"), picks);
    table.update(found.objects);
    fill(said, `${counted(found.objects.length, "object")}${found.is_cut ? `, the first ${PAGE}: narrow them by a prefix` : ""} as of ${count(seq())}.`);
    if (!objects.contains(table.element)) fill(objects, h("div", { class: "bar" }, picked, prefix), table.element, said);
  }

  async function openObject(bucket, key, mine) {
    state.key = key;
    const path = enginePath(name, "buckets", encodeURIComponent(bucket), "objects", encodeURIComponent(key));
    try {
      const { versions } = await get(`${path}/versions`, {}, signal);
      if (mine !== turn) return;
      state.versions = versions;
      drawLine();
      const at = versions.find((one) => one.seq <= seq());
      const body = !at || at.is_deleted ? notice("", `The object did not exist as of ${count(seq())}.`) : isReadOnly() ? notice("", "Read-only mode hides what objects hold.") : await content(path);
      if (mine !== turn) return;
      fill(value, h("section", { class: "panel", "aria-label": key }, h("h2", { class: "long" }, `${bucket}/${key}`), h("div", { class: "row" }, nearest(versions, seq()).map((one) => button(`${one.is_deleted ? "deleted " : ""}${count(one.seq)}`, () => travel(one.seq), { kind: at && one.seq === at.seq ? "chip on" : "chip", "aria-label": `Go to seq ${one.seq}` }))), body));
    } catch (error) {
      if (!signal.aborted && mine === turn) fill(value, problemNotice(error));
    }
  }

  async function content(path) {
    const { data, headers } = await bytesAt(path, { seq: seq() }, signal);
    const text = textOf(data);
    const metadata = headers.get("x-tidelog-metadata");
    return [h("p", { class: "muted" }, `${bytes(data.length)}, written at ${count(Number(headers.get("x-tidelog-seq")))}, read from ${headers.get("x-tidelog-tier") === "cold" ? "the store" : "this disk"}`, metadata && metadata !== "{}" && ` · ${metadata}`), h("pre", {}, text === null ? hexDump(data) : text.slice(0, 65536))];
  }

  const behind = h("div");
  fill(
    main,
    h("div", { class: "title" }, h("h1", { class: "long" }, name), !isReadOnly() && upkeepActions(context, `engine:${name}`, enginePath(name), server.has_store)),
    facts,
    h("section", { class: "panel travel", "aria-label": "Time travel" }, h("div", { class: "title" }, h("h2", {}, "Read as of any seq"), legend()), line, slider, h("div", { class: "row" }, h("span", { class: "muted" }, "Seq"), typed, newest)),
    objects,
    value,
    behind,
  );
  drawLine();
  await load();
  context.every(REFRESH_SECONDS, async () => {
    const fresh = await get(enginePath(name), {}, signal);
    const isNew = fresh.applied_seq !== description.applied_seq;
    description = fresh;
    sample(`behind ${name}`, fresh.applied_seq - fresh.high_water_mark);
    drawLine();
    fill(behind, h("h2", {}, "Applied and not in the store, over time"), chart(samplesOf(`behind ${name}`), { label: "entries that are not in the store", format: short, height: 90 }));
    if (isNew && state.seq === null) await load();
    context.worked();
  });
}
