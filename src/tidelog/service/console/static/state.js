// What the page remembers: theme and mode of this browser, and the measurements that polling brought.

const MODE = "tidelog-read-only";
const THEME = "tidelog-theme";
const KEPT_SAMPLES = 720;
const samples = new Map();

export const isReadOnly = () => localStorage.getItem(MODE) === "yes";
export const setReadOnly = (on) => (on ? localStorage.setItem(MODE, "yes") : localStorage.removeItem(MODE));

export const theme = () => localStorage.getItem(THEME) || "auto";

export function setTheme(name) {
  if (name === "auto") localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, name);
  applyTheme();
}

export function applyTheme() {
  if (theme() === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme();
}

/** Keeps a measurement of now; the oldest are dropped. */
export function sample(key, value) {
  const kept = samples.get(key) || [];
  kept.push({ time: Date.now(), value });
  if (kept.length > KEPT_SAMPLES) kept.shift();
  samples.set(key, kept);
}

export const samplesOf = (key) => samples.get(key) || [];

/** How fast a counter grew over the last measurements, per second; null before there are two. */
export function rateOf(key, over = 6) {
  const kept = samplesOf(key).slice(-over);
  if (kept.length < 2) return null;
  const [first, last] = [kept[0], kept[kept.length - 1]];
  const seconds = (last.time - first.time) / 1000;
  return seconds > 0 ? Math.max(0, last.value - first.value) / seconds : null;
}
