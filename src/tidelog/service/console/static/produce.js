// Produces a message, a new one or one that was read.

import { api, topicPath } from "./api.js";
import { field, h, select } from "./dom.js";
import { count, fromHex, hexLine, textOf, toBase64, toBytes } from "./format.js";
import { dialog, toast } from "./widgets.js";

const FORMS = [["text", "text"], ["json", "JSON"], ["hex", "hex"], ["null", "null (tombstone)"]];

function formOf(data) {
  if (data === null) return "null";
  const text = textOf(data);
  if (text === null) return "hex";
  try {
    JSON.parse(text);
    return /^\s*[[{]/.test(text) ? "json" : "text";
  } catch {
    return "text";
  }
}

const shown = (data, form) => (data === null ? "" : form === "hex" ? hexLine(data) : textOf(data));

function bytesOf(text, form, what) {
  if (form === "hex") {
    const found = fromHex(text);
    if (found === null) throw new Error(`${what} must be hex, two digits a byte`);
    return found;
  }
  if (form === "json") {
    try {
      JSON.parse(text);
    } catch (error) {
      throw new Error(`${what} must be JSON: ${error.message}`);
    }
  }
  return toBytes(text);
}

/** Lines of `name: value`. */
function headersOf(text) {
  return text
    .split("\n")
    .filter((line) => line.trim())
    .map((line) => {
      const at = line.indexOf(":");
      if (at < 1) throw new Error(`a header is a line with name: value, not ${line}`);
      return [line.slice(0, at).trim(), toBase64(toBytes(line.slice(at + 1).trim()))];
    });
}

/** A dialog that produces; `message` is one that was read, to begin with. `done` gets the offset. */
export function produceDialog(topic, description, message, done) {
  const start = message || { key: null, value: toBytes(""), headers: [] };
  const valueForm = formOf(start.value);
  const key = h("input", { type: "text", spellcheck: "false", autocomplete: "off", value: start.key === null ? "" : shown(start.key, textOf(start.key) === null ? "hex" : "text") });
  const keyForm = select([["text", "text"], ["hex", "hex"], ["null", "no key"]], start.key === null ? (message ? "null" : "text") : textOf(start.key) === null ? "hex" : "text", { "aria-label": "Key is" });
  const value = h("textarea", { rows: 8, spellcheck: "false", name: "value" });
  value.value = shown(start.value, valueForm) ?? "";
  const form = select(FORMS, message ? valueForm : "text", { "aria-label": "Value is", onchange: () => {
    value.disabled = form.value === "null";
  } });
  value.disabled = form.value === "null";
  const headers = h("textarea", { rows: 3, spellcheck: "false", placeholder: "name: value" });
  headers.value = start.headers.map(([name, content]) => `${name}: ${content === null ? "" : (textOf(content) ?? hexLine(content))}`).join("\n");
  const isPartitioned = description.partitions.length > 1;
  const partition = select([["", "by key"], ...description.partitions.map((one) => [String(one.partition), String(one.partition)])], message && isPartitioned ? String(message.partition) : "");
  dialog(message ? `Produce ${count(message.offset)} again` : "Produce a message", [
    h("div", { class: "pair" }, field("Key", key), field("Key is", keyForm)),
    h("div", { class: "pair" }, field("Value", value), field("Value is", form)),
    field("Headers", headers),
    isPartitioned && field("Partition", partition),
    message && h("p", { class: "muted" }, "It becomes a new message at the end of the topic. The one you looked at stays."),
  ], {
    action: "Produce",
    wide: true,
    submit: async () => {
      const hasKey = keyForm.value !== "null" && (key.value !== "" || message?.key);
      const body = {
        encoding: "base64",
        key: hasKey ? toBase64(bytesOf(key.value, keyForm.value, "the key")) : null,
        value: form.value === "null" ? null : toBase64(bytesOf(value.value, form.value, "the value")),
        headers: headersOf(headers.value),
      };
      const stored = await api("POST", topicPath(topic, "messages"), { query: { partition: partition.value }, body: { messages: [body] } });
      const where = isPartitioned ? `partition ${stored.partitions[0]}, ` : "";
      toast(`Stored at ${where}offset ${count(stored.offsets[0])}`);
      done(stored.offsets[0]);
    },
  });
}
