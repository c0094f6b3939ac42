"""The look of the report: one style sheet, for light and dark, for wide and narrow, for screens and paper."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e2e5ea; --text: #1c2430; --quiet: #5d6878;
  --cold: #2f6fbf; --hot: #e08a1e; --bad: #b3261e; --grid: #e8ebf0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b212a; --line: #2d3642; --text: #e6eaf0; --quiet: #9aa6b6;
    --cold: #5b9bea; --hot: #f0a545; --bad: #ff8a80; --grid: #2a323d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2.5rem) 4rem; max-width: 84rem;
  background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 0.7rem; }
h3 { font-size: 0.95rem; margin: 0 0 0.5rem; font-weight: 600; }
p { margin: 0.3rem 0; }
code { font: 0.92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); font-size: 0.88rem; }
.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.8rem; margin: 1.3rem 0 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 0.7rem 0.9rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--quiet); font-size: 0.85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0.8rem; }
.card { padding: 0.9rem 1rem; min-width: 0; }
.chart { display: block; width: 100%; height: auto; }
.chart .grid { stroke: var(--grid); }
.chart .tick { fill: var(--quiet); font-size: 12px; font-variant-numeric: tabular-nums; }
.chart .reach { fill: transparent; }
.chart g:hover .reach { fill: var(--grid); }
.chart .cold, .spark path { fill: var(--cold); }
.chart .hot { fill: var(--hot); }
.spark { display: block; width: 7.5rem; height: 1.4rem; }
.legend { margin: 0.5rem 0 0; }
.legend i { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 2px; margin: 0 0.35rem 0 0.9rem; }
.legend i:first-child { margin-left: 0; }
i.cold { background: var(--cold); } i.hot { background: var(--hot); }
.scroll { overflow-x: auto; padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { padding: 0.42rem 0.8rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { color: var(--quiet); font-weight: 600; font-size: 0.82rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
td.prose { white-space: normal; }
table.kept td { padding: 0.42rem 0.4rem; }
table.kept td:nth-child(2) { width: 50%; }
.share { display: flex; min-width: 8rem; height: 0.7rem; border-radius: 3px; overflow: hidden; }
.share { background: var(--grid); }
.kept .share { min-width: 3rem; }
.share i { display: block; height: 100%; flex: none; }
details { margin: 0.6rem 0; }
summary { cursor: pointer; padding: 0.6rem 1rem; overflow-wrap: anywhere; }
details > .charts, details > .card { margin: 0 0.8rem 0.8rem; }
details.card { padding: 0; }
a { color: inherit; }
@media print { body { background: none; max-width: none; } .card, .tile { break-inside: avoid; } }
""".strip()
