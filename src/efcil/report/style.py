"""The style that pages of evaluations build on."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #666; --rule: #ddd; --cell: 0, 114, 178; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --soft: #a0a0a0; --rule: #3a3a3a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 64rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
p.soft, figcaption, .soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .2rem .45rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.matrix td, table.matrix th { padding: .15rem .35rem; font-size: .8rem; border: 0; }
figure { margin: 1rem 0; } svg { width: 100%; max-width: 46rem; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .grid { stroke: var(--rule); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; list-style: none; margin: .2rem 0; }
.legend svg, td svg { width: 26px; height: 8px; vertical-align: middle; margin-right: .4rem; }
details { border-top: 1px solid var(--rule); padding: .4rem 0; } summary { cursor: pointer; }
code { font-size: .85rem; overflow-wrap: anywhere; }
"""
