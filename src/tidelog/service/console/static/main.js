// The shell: finds the page of an address, keys, theme, mode, token.
//
// A page is a function of `(context, ...parts of the address)` that fills `context.main`. What it repeats by
// `context.every` ends when the reader goes elsewhere, and pauses while the tab is hidden.

import { forgetToken, get, hasToken, onTokenNeeded } from "./api.js";
import { cluster } from "./cluster.js";
import { button, field, fill, h, select } from "./dom.js";
import { engines } from "./engines.js";
import { groups } from "./groups.js";
import { overview } from "./overview.js";
import { applyTheme, isReadOnly, setReadOnly, setTheme, theme } from "./state.js";
import { topic } from "./topic.js";
import { dialog, problemNotice, tell } from "./widgets.js";
import { work } from "./work.js";

const PAGES = [
  ["", "Topics", overview],
  ["groups", "Groups", groups],
  ["engines", "Engines", engines],
  ["upkeep", "Upkeep", work],
  ["cluster", "Cluster", cluster],
];
const KEYS = [
  ["/", "go to the filter of the page"],
  ["j, k", "next and previous row"],
  ["Enter", "open the row"],
  ["g t, g g, g e, g u, g c", "topics, groups, engines, upkeep, cluster"],
  ["r", "refresh now"],
  ["Esc", "leave a field, close a dialog or a row"],
  ["?", "this list"],
];
const main = document.getElementById("main");
let leaving = new AbortController();
let refreshers = [];
let server = null;

class Context {
  constructor(signal) {
    this.main = main;
    this.signal = signal;
    this.server = server;
  }

  /** Runs this now, and again so many seconds after it has ended, until the reader leaves the page. */
  every(seconds, work) {
    let timer = null;
    let running = null;
    const run = async () => {
      clearTimeout(timer);
      if (running === null) {
        running = (async () => {
          try {
            await work();
          } catch (error) {
            if (!this.signal.aborted) this.failed(error);
          }
        })();
      }
      await running;
      running = null;
      if (!this.signal.aborted) timer = setTimeout(() => (document.hidden ? null : run()), seconds * 1000);
    };
    refreshers.push(run);
    return run();
  }

  failed(error) {
    if (error.name === "AbortError") return;
    const shown = document.getElementById("page-problem");
    const element = h("div", { id: "page-problem" }, problemNotice(error));
    if (shown) shown.replaceWith(element);
    else main.prepend(element);
  }

  worked() {
    document.getElementById("page-problem")?.remove();
  }
}

function parts() {
  return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
}

async function navigate() {
  if (location.hash && !location.hash.startsWith("#/")) return;
  leaving.abort();
  leaving = new AbortController();
  refreshers = [];
  const { signal } = leaving;
  const [name = "", ...rest] = parts();
  document.querySelectorAll("dialog").forEach((one) => one.close());
  markCurrent(name === "topics" ? "" : name);
  try {
    server ??= await get("/v1", {}, signal);
  } catch (error) {
    if (!signal.aborted) await tryAgain(error);
    return;
  }
  if (signal.aborted) return;
  const page = name === "topics" ? topic : PAGES.find(([key]) => key === name)?.[2];
  fill(main);
  document.title = "tidelog";
  const context = new Context(signal);
  if (!page) {
    fill(main, h("h1", {}, "Nothing here"), h("p", {}, "This address is no page of the console. ", h("a", { href: "#/" }, "Topics")));
    return;
  }
  try {
    await page(context, ...rest);
  } catch (error) {
    if (signal.aborted) return;
    context.failed(error);
    const [list, label] = name === "topics" ? ["", "All topics"] : [name, "Back"];
    if (error.status === 404) main.append(h("p", {}, h("a", { href: `#/${list}` }, label)));
  }
}

async function tryAgain(error) {
  fill(main, problemNotice(error), h("div", { class: "row" }, button("Try again", navigate, { kind: "primary" })));
}

// The header

function markCurrent(name) {
  fill(
    document.getElementById("nav"),
    PAGES.map(([key, label]) => h("a", { href: `#/${key}`, "aria-current": key === name ? "page" : null }, label)),
  );
}

function drawTools() {
  const readOnly = isReadOnly();
  document.documentElement.dataset.mode = readOnly ? "look" : "work";
  fill(
    document.getElementById("tools"),
    button(readOnly ? "Read-only" : "Read and write", () => {
      setReadOnly(!isReadOnly());
      drawTools();
      navigate();
    }, { kind: readOnly ? "mode on" : "mode", "aria-pressed": String(readOnly), title: "Read-only hides what messages hold, and every button that changes something" }),
    select([["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], theme(), { "aria-label": "Theme", onchange: (event) => setTheme(event.target.value) }),
    hasToken() && button("Forget token", () => {
      forgetToken();
      server = null;
      drawTools();
      navigate();
    }, { kind: "quiet" }),
    button("?", showKeys, { kind: "quiet", "aria-label": "Keys" }),
  );
}

function showKeys() {
  if (document.querySelector("dialog")) return;
  dialog("Keys", h("dl", { class: "keys" }, KEYS.map(([keys, what]) => [h("dt", {}, keys.split(", ").map((one) => h("kbd", {}, one))), h("dd", {}, what)])));
}

onTokenNeeded(
  (message) =>
    new Promise((resolve) => {
      const input = h("input", { type: "password", autocomplete: "off", name: "token" });
      let token = null;
      const element = dialog("A token is needed", [h("p", {}, message), field("Token", input, "It stays in this tab, and is gone when the tab is closed. `tidelog auth` makes tokens.")], {
        action: "Use it",
        submit: async () => {
          token = input.value.trim() || null;
        },
      });
      element.addEventListener("close", () => {
        resolve(token);
        setTimeout(drawTools);
      });
    }),
);

// Keys

let waitsForPage = false;

function rows() {
  return [...main.querySelectorAll("tr.pick")].filter((one) => one.offsetParent !== null);
}

function step(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const next = at === -1 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by));
  all[next].focus();
  all[next].scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  const typing = target.matches?.("input, textarea, select");
  if (event.key === "Escape") {
    if (typing && !target.closest("dialog")) target.blur();
    else main.dispatchEvent(new CustomEvent("escape"));
    return;
  }
  if (typing || document.querySelector("dialog")) return;
  if (waitsForPage) {
    waitsForPage = false;
    const page = { t: "", g: "groups", e: "engines", u: "upkeep", c: "cluster" }[event.key];
    if (page !== undefined) location.hash = `#/${page}`;
    return;
  }
  const act = {
    "/": () => main.querySelector("[data-filter]")?.focus(),
    "?": showKeys,
    j: () => step(1),
    k: () => step(-1),
    g: () => {
      waitsForPage = true;
      setTimeout(() => {
        waitsForPage = false;
      }, 1500);
    },
    r: () => refreshers.forEach((run) => run()),
    Enter: () => document.activeElement?.matches("tr.pick") && document.activeElement.click(),
  }[event.key];
  if (act) {
    act();
    if (event.key !== "Enter" || document.activeElement?.matches("tr.pick")) event.preventDefault();
  }
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refreshers.forEach((run) => run());
});
window.addEventListener("unhandledrejection", (event) => tell(event.reason));
window.addEventListener("hashchange", navigate);
applyTheme();
drawTools();
navigate();
