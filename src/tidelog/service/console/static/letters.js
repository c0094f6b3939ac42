// Dead letters: messages that subscriptions gave up, sent back or discarded.

import { api, get, topicPath } from "./api.js";
import { button, fill, h } from "./dom.js";
import { count, counted } from "./format.js";
import { topicLink } from "./overview.js";
import { isReadOnly } from "./state.js";
import { dialog, empty, problemNotice, toast } from "./widgets.js";

const PAGE = 100;

/** The open letters of a topic of dead letters; read when a person asks for them. */
export function deadLetters(context, name) {
  const { signal } = context;
  const state = { letters: [], next: null, chosen: new Set() };
  const element = h("div");

  async function read(from = 0) {
    try {
      const found = await get(topicPath(name, "dead-letters"), { offset: from, limit: PAGE }, signal);
      state.letters = from ? [...state.letters, ...found.letters] : found.letters;
      state.next = found.next;
      if (!from) state.chosen.clear();
      draw();
    } catch (error) {
      if (error.name !== "AbortError") fill(element, problemNotice(error), ask());
    }
  }

  const ask = () => empty("Dead letters", "Where a subscription moves what it gave up to this topic, its letters are listed here with their origin and reasons.", button("List open letters", () => read(), { kind: "primary" }));
  const chosen = () => (state.chosen.size ? [...state.chosen] : state.letters.map((one) => one.offset));
  const label = () => (state.chosen.size ? counted(state.chosen.size, "letter") : `all ${counted(state.letters.length, "letter")} shown`);

  function replay() {
    dialog("Send back", h("p", {}, `Appends ${label()} again to the topics that they came from. They are new messages there, for all subscriptions.`), {
      action: "Send back",
      submit: async () => {
        const done = await api("POST", topicPath(name, "dead-letters", "replay"), { body: { offsets: chosen() } });
        toast(`Sent ${counted(done.sent, "letter")} back`);
        for (const one of done.refused) toast(`Letter ${one.offset} was not sent: ${one.detail}`, { bad: true });
        await read();
      },
    });
  }

  function discard() {
    dialog("Discard", h("p", {}, `Marks ${label()} as done with. They stay in the topic until its retention deletes them.`), {
      action: "Discard",
      kind: "danger",
      submit: async () => {
        await api("POST", topicPath(name, "dead-letters", "discard"), { body: { offsets: chosen() } });
        toast("Discarded");
        await read();
      },
    });
  }

  function line(letter) {
    const box = h("input", { type: "checkbox", "aria-label": `Choose letter ${letter.offset}`, onchange: () => {
      if (box.checked) state.chosen.add(letter.offset);
      else state.chosen.delete(letter.offset);
    } });
    box.checked = state.chosen.has(letter.offset);
    const { message } = letter;
    const value = isReadOnly() ? "•••" : message.value === null ? "null" : `${message.encoding === "base64" ? "base64 " : ""}${String(message.value).slice(0, 160)}`;
    const origin = letter.origin_topic === null ? "unknown" : h("a", { href: topicLink(letter.origin_topic) }, `${letter.origin_topic} ${count(letter.origin_offset)}`);
    return h("tr", {}, !isReadOnly() && h("td", {}, box), h("td", { class: "number" }, count(letter.offset)), h("td", {}, origin), h("td", {}, letter.subscription || "–"), h("td", { class: "number" }, letter.deliveries ?? "–"), h("td", {}, letter.nack_reason || letter.reason || "–"), h("td", { class: "value" }, value));
  }

  function draw() {
    if (!state.letters.length) {
      fill(element, empty("No open letters", "Nothing in this topic waits to be sent back or discarded.", button("Look again", () => read())));
      return;
    }
    const heads = [!isReadOnly() && "", "Letter", "From", "Subscription", "Deliveries", "Reason", "Value"].filter((one) => one !== false);
    fill(
      element,
      !isReadOnly() && h("div", { class: "bar" }, button("Send back…", replay, { kind: "primary" }), button("Discard…", discard, { kind: "danger" }), h("span", { class: "muted" }, "Without a choice, all that are shown.")),
      h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "hidden" }, "Dead letters"), h("thead", {}, h("tr", {}, heads.map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, state.letters.map(line)))),
      state.next !== null && h("div", { class: "row centre" }, button("Read more", () => read(state.next))),
    );
  }

  fill(element, ask());
  return element;
}
