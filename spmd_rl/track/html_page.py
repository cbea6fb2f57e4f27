"""The style sheet of `report.html` and its HTML components. The page needs no network."""

from collections.abc import Sequence
from html import escape

PALETTE = """
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#22262b;--soft:#6a727d;--rule:#e6e6e2;--axis:#b9bdc2;
--c1:#2f6db3;--c2:#d07a2d;--c3:#3f8f63;--c4:#8560a8;--c5:#b94e48;--c6:#2f8f9d;--c7:#b3942f;--c8:#7a6a58;--other:#b9bdc2}
@media(prefers-color-scheme:dark){:root{--bg:#16181b;--card:#1d2024;--ink:#e4e6e8;--soft:#98a0a9;--rule:#2c3035;
--axis:#565c63;--c1:#6ea3e0;--c2:#e09a58;--c3:#6bb98d;--c4:#b08fd0;--c5:#d97a74;--c6:#5fb8c5;--c7:#d1b452;--c8:#a99883;
--other:#5c636b}}
"""
"""Colours of the package's pages, light and dark, as variables."""

STYLE = (
    PALETTE
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Inter,Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-font-smoothing:antialiased}
main{max-width:1240px;margin:0 auto;padding:40px 28px 64px}
h1{font-size:26px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;font-weight:620;letter-spacing:-.005em;margin:40px 0 12px}
h3{font-size:13.5px;font-weight:600;margin:0}
.lead{color:var(--soft);margin:0}
code,pre{font:12.5px/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
.command{margin:18px 0 0;padding:10px 14px;background:var(--card);border:1px solid var(--rule);border-radius:8px}
dl.facts{display:flex;flex-wrap:wrap;gap:6px 28px;margin:16px 0 0;font-size:13.5px}
dl.facts div{display:flex;gap:8px}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(178px,1fr));gap:14px;margin:26px 0 0}
.tile,.card,.sample{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tile{padding:14px 16px}.tile b{display:block;font-size:22px;font-weight:620;letter-spacing:-.02em;line-height:1.3;
overflow-wrap:anywhere;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);font-size:13px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:16px}
.card{padding:14px 16px 8px;margin:0;min-width:0}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 16px;margin-bottom:8px}
figcaption .note{color:var(--soft);font-size:12.5px}
.key{display:inline-flex;align-items:center;gap:6px;color:var(--soft);font-size:12.5px}
.key i{width:10px;height:10px;border-radius:3px;background:var(--c)}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;margin-left:auto}
svg{display:block;width:100%;height:auto;overflow:visible}
svg .grid{stroke:var(--rule)}svg .axis{stroke:var(--axis)}svg .mark{stroke:var(--axis);stroke-dasharray:2 3}
svg .num{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
svg .line polyline{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
svg .line .faint{stroke-width:1;opacity:.35}
svg .line circle{fill:currentColor}
svg .pale{opacity:.3}svg .striped{stroke-dasharray:3 2.5}
svg rect:hover,svg .striped:hover{opacity:.75}
.key .pale{opacity:.3}.key .striped{background:repeating-linear-gradient(var(--c) 0 2px,transparent 2px 4px)}
.samples{display:grid;gap:12px;margin:10px 0 4px}details .grid2{margin-top:12px}
.sample{padding:14px 16px;min-width:0}.sample header{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;
color:var(--soft);margin-bottom:8px}.sample header b{color:var(--ink);font-variant-numeric:tabular-nums}
.sample pre{border-left:3px solid var(--rule);padding-left:12px;max-height:220px;overflow:auto}
.sample pre.marked{border-color:var(--c)}.sample h4{font-size:12px;font-weight:400;color:var(--soft);margin:10px 0 2px}
table{border-collapse:collapse;margin:14px 0 8px;font-size:12.5px;font-variant-numeric:tabular-nums}
th,td{padding:3px 0 3px 40px;text-align:right;font-weight:400}th{color:var(--soft)}tr>:first-child{padding-left:0;
color:var(--soft);text-align:left}tr+tr{border-top:1px solid var(--rule)}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft);font-size:13.5px}
details pre{margin-top:10px;padding:14px 16px;background:var(--card);border:1px solid var(--rule);border-radius:10px}
footer{margin-top:44px;color:var(--soft);font-size:12.5px}
@media print{body{background:#fff}.card,.tile,.sample{break-inside:avoid}}
"""
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, body: str) -> str:
    """Return the whole page. Its content security policy forbids every request and every script."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Return names and values in a row, without empty values."""
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in pairs
        if value not in (None, "")
    )
    return f'<dl class="facts">{shown}</dl>'


def tile(number: str, words: str) -> str:
    """Return a tile that shows one number and its meaning."""
    return f'<div class="tile"><b>{escape(number)}</b><span>{escape(words)}</span></div>'


def key(name: str, color: str, look: str = "solid") -> str:
    """Return an entry of a legend; `look` is one of those of `svg.rect`."""
    return f'<span class="key" style="--c:{color}"><i class="{look}"></i>{escape(name)}</span>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of numbers. `columns` are HTML, cells are text; the first column names the rows."""
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def figure(title: str, note: str, keys: str, drawing: str) -> str:
    """Return a drawing with its title, note and legend; an empty string without a drawing."""
    if not drawing:
        return ""
    caption = f'<h3>{escape(title)}</h3><span class="note">{escape(note)}</span><span class="keys">{keys}</span>'
    return f'<figure class="card"><figcaption>{caption}</figcaption>{drawing}</figure>\n'


def box(name: str, text: str, marked: bool = False) -> str:
    """Return a text in a box under its name; a `marked` one has the colour of its sample."""
    look = ' class="marked"' if marked else ""
    return f"<h4>{escape(name)}</h4><pre{look}>{escape(text)}</pre>"


def section(title: str, content: str) -> str:
    """Return a heading with its content; an empty string without content."""
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>\n" if content else ""
