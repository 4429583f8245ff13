"""The style of report.html: light and dark, wide and narrow."""

STYLE = """\
:root {
  color-scheme: light dark;
  --ink: #1d2430; --quiet: #5d6675; --line: #dfe3ea; --paper: #ffffff; --panel: #f5f7fa;
  --policy: #1f6feb; --reference: #8a94a6; --good: #18794e; --bad: #c62a2f;
  --good-paper: #e8f6ee; --bad-paper: #fdecec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ef; --quiet: #9aa4b5; --line: #2d3440; --paper: #12151b; --panel: #1a1f28;
    --policy: #6ba6ff; --reference: #8c97aa; --good: #5fcf93; --bad: #ff8b8b;
    --good-paper: #14291e; --bad-paper: #331a1c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .35rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 3rem 0 .4rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .3rem 0 1rem; }
.lead { font-size: 1.1rem; max-width: 46rem; margin-bottom: .4rem; }
.quiet { color: var(--quiet); }
.small { font-size: .86rem; }
code { font: .86em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 1rem 0 0; }
a { color: var(--policy); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: .8rem; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: .6rem;
  padding: .85rem 1rem .9rem; }
.card .value { font-size: 1.75rem; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.card .name { font-size: .9rem; color: var(--quiet); }
.chip { display: inline-block; border-radius: 1rem; padding: .05rem .6rem; font-size: .86rem;
  font-variant-numeric: tabular-nums; background: var(--line); white-space: nowrap; }
.chip.good { background: var(--good-paper); color: var(--good); }
.chip.bad { background: var(--bad-paper); color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .45rem .75rem .45rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-size: .82rem; font-weight: 600; color: var(--quiet); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
svg { display: block; width: 100%; min-width: 38rem; height: auto; margin-bottom: .8rem; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .axis { fill: var(--quiet); font-size: 12px; }
svg .grid { stroke: var(--line); }
svg .policy { stroke: var(--policy); fill: var(--policy); }
svg .reference { stroke: var(--reference); fill: var(--paper); }
svg .zero { stroke: var(--quiet); }
svg .better { stroke: var(--good); fill: var(--good); }
svg .worse { stroke: var(--bad); fill: var(--bad); }
svg .same { stroke: var(--reference); fill: var(--reference); }
svg line.better, svg line.worse, svg line.same { stroke-width: 2.5; stroke-linecap: round; }
svg line.policy, svg line.reference { stroke-width: 2.5; stroke-linecap: round; }
svg circle { stroke-width: 2.5; }
details { border-top: 1px solid var(--line); }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: .6rem 0; font-weight: 600; }
summary .quiet { font-weight: 400; }
.item { border: 1px solid var(--line); border-radius: .6rem; margin: 0 0 .8rem; overflow: hidden; }
.item .prompt { padding: .6rem .9rem; background: var(--panel); }
.item .answers { display: grid; grid-template-columns: 1fr 1fr; }
.item .answers > div { padding: .6rem .9rem; border-top: 1px solid var(--line); min-width: 0; }
.item .answers > div + div { border-left: 1px solid var(--line); }
.item .who { font-size: .82rem; color: var(--quiet); display: flex; gap: .5rem; }
.item .said { white-space: pre-wrap; overflow-wrap: anywhere; }
.pass::before { content: "\\2713\\00a0"; color: var(--good); }
.fail::before { content: "\\2717\\00a0"; color: var(--bad); }
.fail .said { color: var(--ink); }
.key { display: inline-flex; align-items: center; gap: .4rem; margin-right: 1.2rem; }
.dot { width: .75rem; height: .75rem; border-radius: 50%; border: 2.5px solid var(--policy);
  background: var(--policy); }
.dot.reference { border-color: var(--reference); background: var(--paper); }
@media (max-width: 40rem) {
  .item .answers { grid-template-columns: 1fr; }
  .item .answers > div + div { border-left: 0; }
}
@media print { details { break-inside: avoid; } }
"""
