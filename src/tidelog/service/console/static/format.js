// Numbers, sizes, times and bytes as people read them.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNT_UNITS = ["", "k", "M", "G", "T"];

export const count = (value) => Math.round(value).toLocaleString("en-US");
export const counted = (value, noun) => `${count(value)} ${noun}${Math.round(value) === 1 ? "" : "s"}`;

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) {
    value /= base;
    unit += 1;
  }
  const text = unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
  return [text, units[unit]];
}

export const bytes = (value) => scaled(value, 1024, BYTE_UNITS).join(" ");
export const short = (value) => scaled(value, 1000, COUNT_UNITS).join("");

/** A rate per second. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 10) return `${value.toFixed(1)}/s`;
  return `${short(value)}/s`;
}

/** How long something lasted, in its two largest units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const pad = (value, width = 2) => String(value).padStart(width, "0");

/** A moment in the reader's time zone, to the millisecond. */
export function moment(value) {
  const date = value instanceof Date ? value : new Date(value);
  if (Number.isNaN(date.getTime())) return String(value);
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  const time = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return `${day} ${time}.${pad(date.getMilliseconds(), 3)}`;
}

export const clock = (date) => `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;

export function ago(value) {
  const seconds = (Date.now() - new Date(value).getTime()) / 1000;
  return seconds < 1 ? "now" : `${duration(seconds)} ago`;
}

/** What an `<input type=datetime-local step=1>` takes. */
export function localInput(date) {
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day}T${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

// Bytes

export function fromBase64(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at += 1) found[at] = binary.charCodeAt(at);
  return found;
}

export function toBase64(data) {
  let binary = "";
  for (let at = 0; at < data.length; at += 8192) binary += String.fromCharCode(...data.subarray(at, at + 8192));
  return btoa(binary);
}

const strict = new TextDecoder("utf-8", { fatal: true });
const encoder = new TextEncoder();
export const toBytes = (text) => encoder.encode(text);

/** The text of bytes that are UTF-8, else null. */
export function textOf(data) {
  try {
    return strict.decode(data);
  } catch {
    return null;
  }
}

export const hexLine = (data) => Array.from(data, (one) => pad(one.toString(16))).join(" ");

/** Bytes as `xxd` shows them: position, hex, text. */
export function hexDump(data, most = 65536) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, most); at += 16) {
    const part = data.subarray(at, at + 16);
    const printable = Array.from(part, (one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : ".")).join("");
    lines.push(`${pad(at.toString(16), 8)}  ${hexLine(part).padEnd(47)}  ${printable}`);
  }
  if (data.length > most) lines.push(`… ${count(data.length - most)} bytes more`);
  return lines.join("\n");
}

/** Bytes of text such as `00 ff 7a`; null when it is not hex. */
export function fromHex(text) {
  const digits = text.replace(/\s+/g, "");
  if (digits.length % 2 || /[^0-9a-fA-F]/.test(digits)) return null;
  return Uint8Array.from(digits.match(/../g) || [], (pair) => parseInt(pair, 16));
}
