// Parts that several pages use: toasts, dialogs, sortable tables, the strip of a log, charts of what was measured.

import { button, fill, h, svg } from "./dom.js";
import { clock, count, short } from "./format.js";

/** Tells what happened; errors stay until they are closed. */
export function toast(text, { bad = false, hint = "" } = {}) {
  const element = h(
    "div",
    { class: bad ? "toast bad" : "toast" },
    h("div", {}, text, hint && h("div", { class: "hint" }, hint)),
    button("×", () => element.remove(), { kind: "quiet", "aria-label": "Close this message" }),
  );
  document.getElementById("toasts").append(element);
  if (!bad) setTimeout(() => element.remove(), 6000);
}

export function tell(error) {
  if (error.name !== "AbortError") toast(error.message, { bad: true, hint: error.hint || "" });
}

/** A notice in the page. `kind`: "", "bad", "warn" or "good". */
export function notice(kind, ...children) {
  return h("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : null }, ...children);
}

export function problemNotice(error) {
  return notice("bad", h("strong", {}, error.message), error.place ? h("div", {}, h("a", { href: error.place }, `Open this page at ${error.node}`)) : error.hint && h("div", { class: "hint" }, error.hint));
}

/** What a page shows where there is nothing. */
export function empty(title, text, ...actions) {
  return h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text), actions.length > 0 && h("div", { class: "row" }, actions));
}

/**
 * A modal dialog with a form. `submit` returns a promise: the dialog closes when it is done, and shows what went wrong.
 * `confirm` is a text that has to be typed before the form can be sent.
 */
export function dialog(title, body, { action = "Save", kind = "primary", submit = null, confirm = null, wide = false } = {}) {
  const failed = h("div", {});
  const typed = confirm === null ? null : h("input", { type: "text", autocomplete: "off", spellcheck: "false", "aria-label": `Type ${confirm} to confirm` });
  const send = h("button", { type: "submit", class: kind, disabled: typed !== null }, action);
  typed?.addEventListener("input", () => {
    send.disabled = typed.value !== confirm;
  });
  const form = h(
    "form",
    {},
    h("header", {}, h("h2", {}, title), button("×", () => element.close(), { kind: "quiet", "aria-label": "Close" })),
    h("div", { class: "body" }, body, typed && h("label", { class: "field" }, h("span", { class: "label" }, "Type ", h("code", {}, confirm), " to confirm"), typed), failed),
    submit && h("footer", {}, button("Cancel", () => element.close()), send),
  );
  const element = h("dialog", { class: wide ? "wide" : null, "aria-label": title }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (submit === null || send.disabled) return;
    send.disabled = true;
    try {
      await submit();
      element.close();
    } catch (error) {
      fill(failed, problemNotice(error));
      send.disabled = typed !== null && typed.value !== confirm;
    }
  });
  element.addEventListener("close", () => element.remove());
  document.body.append(element);
  element.showModal();
  element.querySelector(".body input, .body select, .body textarea")?.focus();
  return element;
}

// A row that is replaced between the press and the release of a button would swallow the click: drawing waits for it.
let isPressed = false;
const afterRelease = new Set();
window.addEventListener("pointerdown", () => {
  isPressed = true;
});
for (const name of ["pointerup", "pointercancel"]) {
  window.addEventListener(name, () => {
    isPressed = false;
    setTimeout(() => {
      for (const draw of [...afterRelease]) draw();
      afterRelease.clear();
    });
  });
}

/** Draws a body again, and gives the focus back to the row, or to the part of it, that had it. */
function keepingFocus(body, draw) {
  const focused = document.activeElement;
  const row = body.contains(focused) ? focused.closest("tr") : null;
  const key = row?.dataset.key;
  const at = row && focused !== row ? [...row.querySelectorAll("a, button, input")].indexOf(focused) : -1;
  draw();
  if (key === undefined) return;
  const again = [...body.rows].find((one) => one.dataset.key === key);
  const target = at >= 0 ? again?.querySelectorAll("a, button, input")[at] : again;
  target?.focus({ preventScroll: true });
}

/**
 * A table whose columns sort. A column: `{key, label, value(row), cell(row), number}`. The first column
 * names its rows: by it the focus survives a refresh.
 */
export function sortedTable({ columns, caption, sort, descending = false, onselect = null, empty: whenEmpty = null }) {
  const state = { key: sort || columns[0].key, down: descending, rows: [] };
  const body = h("tbody");
  const heads = columns.map((column) => {
    const cell = h("th", { scope: "col", class: column.number ? "number" : null });
    if (!column.value) return fill(cell, column.label);
    return fill(
      cell,
      h("button", { type: "button", class: "sort", onclick: () => sortBy(column) }, column.label, h("span", { class: "arrow", "aria-hidden": "true" })),
    );
  });
  const element = h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, heads)), body));

  // Before the release counts as one, so that a click on a head sorts at once.
  function sortBy(column) {
    isPressed = false;
    state.down = state.key === column.key ? !state.down : Boolean(column.number);
    state.key = column.key;
    draw();
  }

  function draw() {
    if (isPressed) afterRelease.add(draw);
    else keepingFocus(body, redraw);
  }

  function redraw() {
    const column = columns.find((one) => one.key === state.key);
    const turn = state.down ? -1 : 1;
    const rows = [...state.rows].sort((a, b) => {
      const [one, other] = [column.value(a), column.value(b)];
      return turn * (one < other ? -1 : one > other ? 1 : 0);
    });
    columns.forEach((one, at) => {
      const order = one.key === state.key ? (state.down ? "descending" : "ascending") : null;
      if (order) heads[at].setAttribute("aria-sort", order);
      else heads[at].removeAttribute("aria-sort");
    });
    fill(
      body,
      rows.map((row) => {
        const cells = columns.map((one) => h("td", { class: one.number ? "number" : one.class || null, "data-label": one.label }, one.cell ? one.cell(row) : one.value(row)));
        return h("tr", { "data-key": row.id ?? columns[0].value(row), class: onselect ? "pick" : null, tabindex: onselect ? "-1" : null, onclick: onselect ? (event) => !event.target.closest("a, button, input") && onselect(row) : null }, cells);
      }),
      rows.length === 0 && whenEmpty && h("tr", {}, h("td", { colspan: columns.length, class: "muted" }, whenEmpty)),
    );
  }

  return {
    element,
    update(rows) {
      state.rows = rows;
      draw();
    },
  };
}

// The strip: three lanes over the same offsets. What the store lane lacks at its right end would be lost with the disk.

const LANES = [
  ["cold", "store", "in the object store"],
  ["hot", "disk", "on this disk"],
  ["cached", "memory", "in memory"],
];

/** Where the messages of a partition are. `hasStore`: whether there is an object store at all. */
export function strip(info, hasStore, { small = false } = {}) {
  const { start_offset: start, next_offset: end } = info;
  const span = Math.max(1, end - start);
  const ranges = {
    cold: hasStore ? [start, Math.max(start, info.shipped_offset)] : [start, start],
    hot: [Math.max(start, info.hot_start_offset), end],
    cached: [Math.max(start, end - info.cached_messages), end],
  };
  const risk = hasStore ? [Math.max(start, info.shipped_offset), end] : [start, start];
  const place = ([first, stop]) => ({ left: `${(100 * (first - start)) / span}%`, width: `${(100 * (stop - first)) / span}%` });
  const lane = ([key, label, where]) => {
    const [first, stop] = ranges[key];
    const text = stop > first ? `${count(stop - first)} messages ${where}: ${count(first)} to ${count(stop - 1)}` : `none ${where}`;
    return h(
      "div",
      { class: "lane", title: text },
      !small && h("span", { class: "lane-name" }, label),
      h("span", { class: "track" }, stop > first && h("span", { class: `part ${key}`, style: place(ranges[key]) }), key === "cold" && risk[1] > risk[0] && h("span", { class: "part risk", style: place(risk), title: `${count(risk[1] - risk[0])} messages on this disk only` })),
      !small && h("span", { class: "lane-count" }, stop > first ? short(stop - first) : "–"),
    );
  };
  const words = LANES.map(([key, , where]) => `${count(ranges[key][1] - ranges[key][0])} ${where}`).join(", ");
  return h(
    "div",
    { class: small ? "strip small" : "strip", role: "img", "aria-label": `offsets ${start} to ${end}: ${words}` },
    LANES.filter(([key]) => hasStore || key !== "cold").map(lane),
    !small && h("div", { class: "ends" }, h("span", {}, count(start)), h("span", { class: "live" }, h("i", { "aria-hidden": "true" }), `live, next is ${count(end)}`)),
  );
}

export function stripLegend(hasStore) {
  const entry = (kind, text) => h("span", { class: "entry" }, h("span", { class: `swatch ${kind}` }), text);
  return h(
    "div",
    { class: "legend" },
    hasStore && entry("cold", "cold: in the store"),
    entry("hot", "hot: on this disk"),
    entry("cached", "cached: in memory"),
    hasStore && entry("risk", "not shipped yet: lost if this disk dies"),
    h("span", { class: "entry" }, h("span", { class: "swatch tip" }), "live: the next message"),
  );
}

/** A line over time of measurements `{time, value}`. */
export function chart(points, { label, format = short, height = 72 } = {}) {
  const width = 320;
  const [left, bottom, top] = [40, 16, 6];
  if (points.length < 2) return h("p", { class: "muted small" }, "A line appears here as the page measures; it keeps an hour.");
  const [first, last] = [points[0].time, points[points.length - 1].time];
  const high = Math.max(1, ...points.map((one) => one.value));
  const x = (time) => left + ((width - left - 4) * (time - first)) / Math.max(1, last - first);
  const y = (value) => top + (height - top - bottom) * (1 - value / high);
  const line = points.map((one) => `${x(one.time).toFixed(1)},${y(one.value).toFixed(1)}`).join(" ");
  const area = `${left},${y(0)} ${line} ${x(last).toFixed(1)},${y(0)}`;
  const now = points[points.length - 1].value;
  return svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label}: ${format(now)} now, at most ${format(high)}` },
    svg("line", { class: "grid", x1: left, x2: width - 4, y1: y(0), y2: y(0) }),
    svg("line", { class: "grid", x1: left, x2: width - 4, y1: y(high), y2: y(high) }),
    svg("polygon", { class: "area", points: area }),
    svg("polyline", { class: "line", points: line }),
    svg("text", { x: left - 5, y: y(high) + 4, "text-anchor": "end" }, format(high)),
    svg("text", { x: left - 5, y: y(0) + 3, "text-anchor": "end" }, "0"),
    svg("text", { x: left, y: height - 2 }, clock(new Date(first))),
    svg("text", { x: width - 4, y: height - 2, "text-anchor": "end" }, clock(new Date(last))),
  );
}

/** Tabs as links; `current` is the key of the open one. */
export function tabs(entries, current) {
  const bar = h(
    "nav",
    { class: "tabs", "aria-label": "Parts of this page" },
    entries.map(([key, label, href]) => h("a", { href, "aria-current": key === current ? "page" : null }, label)),
  );
  // On a phone the tabs scroll: the one that is shown must not be outside. Once the bar is in the page it has a width.
  requestAnimationFrame(() => {
    const shown = bar.querySelector("[aria-current]");
    if (shown) bar.scrollLeft = shown.offsetLeft - bar.offsetLeft - (bar.clientWidth - shown.offsetWidth) / 2;
  });
  return bar;
}
