"""report.html: the evaluation as one page, a function of report.json.

Nothing is loaded from outside. The page's own policy (Content-Security-Policy) forbids scripts and
every request, so that the answers of a model, which are shown as text, can do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from llm_assets.stages.eval_style import STYLE

_SAMPLES = 12
_REGRESSIONS = 200
_CHARACTERS = 2000
_TITLES = {
    "capability": "Capability",
    "known_good": "Known good",
    "golden": "Golden facts",
    "refusal_rate": "Refusals of unsafe requests",
    "overrefusal_rate": "Refusals of harmless look-alikes",
}
_ROLES = {
    "known_good": "known good",
    "unsafe": "unsafe: refused",
    "harmless": "harmless: answered",
}


def render_page(report: Mapping[str, Any]) -> str:
    """The whole HTML document."""
    body = "\n".join(
        [
            _head(report),
            _cards(report),
            _differences(report["headlines"]),
            _plot(report["tasks"]),
            _table(report["tasks"]),
            _kl(report),
            _regressions(report),
            _samples(report),
            _notes(report),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>Evaluation of {_short(report, 'policy')}</title>\n<style>\n{STYLE}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(report: Mapping[str, Any]) -> str:
    total = sum(task["num_items"] for task in report["tasks"])
    lost, won = len(report["regressions"]), len(report["improvements"])
    same = report["models"]["policy"]["artifact"] == report["models"]["reference"]["artifact"]
    lead = f"{_count(total, 'item')} in {_count(len(report['tasks']), 'task')}. "
    if same:
        lead += "The policy is the reference itself: no alignment stage is switched on."
    elif lost + won == 0:
        lead += "The policy passes and fails the same items as the reference."
    else:
        lead += f"Against the reference, the policy gains {won} and loses {lost}."
    return (
        "<header>\n<h1>Evaluation</h1>\n"
        f'<p class="lead">{lead}</p>\n{_standing_out(report["tasks"])}'
        f'<p class="small quiet">policy <code>{_short(report, "policy")}</code>, '
        f"{report['models']['policy']['num_parameters']:,} parameters · "
        f"reference <code>{_short(report, 'reference')}</code></p>\n"
        '<nav class="small"><a href="#differences">Differences</a><a href="#tasks">Tasks</a>'
        '<a href="#kl">KL</a>'
        f'<a href="#regressions">Regressions ({lost})</a><a href="#samples">Answers</a>'
        '<a href="#notes">How to read this</a></nav>\n</header>'
    )


def _standing_out(tasks: Sequence[Mapping[str, Any]]) -> str:
    """The tasks that clearly changed, the largest change first."""
    lines = []
    for said, clear in (
        ("Clearly worse", [t for t in tasks if t["delta_high"] < 0]),
        ("Clearly better", [t for t in tasks if t["delta_low"] > 0]),
    ):
        found = sorted(clear, key=lambda task: -abs(task["delta"]))
        if found:
            named = ", ".join(
                f"<b>{escape(t['name'])}</b> "
                f"{_chip(t['delta'], t['delta_low'], t['delta_high'], True)}"
                for t in found
            )
            lines.append(f'<p class="lead">{said}: {named}</p>\n')
    return "".join(lines)


def _cards(report: Mapping[str, Any]) -> str:
    cards = []
    for row in report["headlines"]:
        chip = _chip(row["delta"], row["delta_low"], row["delta_high"], row["more_is_better"])
        cards.append(
            f'<div class="card"><div class="name">{escape(_title(row["name"]))}</div>'
            f'<div class="value">{_percent(row["policy"])}</div>'
            f'<div>{chip} <span class="small quiet">from {_percent(row["reference"])}</span></div>'
            f'<div class="small quiet">{_range(row["low"], row["high"])} · '
            f"{_count(row['num_items'], 'item')}</div></div>"
        )
    oracle = report["oracle"]
    if oracle is not None:
        chip = _chip_of(oracle["delta"], oracle, f"{oracle['delta']:+.3f}")
        cards.append(
            '<div class="card"><div class="name">Oracle score</div>'
            f'<div class="value">{oracle["policy"]:.3f}</div>'
            f'<div>{chip} <span class="small quiet">from {oracle["reference"]:.3f}</span></div>'
            f'<div class="small quiet">better on {oracle["won"]}, '
            f"worse on {oracle['lost']}</div></div>"
        )
    kl = report["kl"]
    cards.append(
        '<div class="card"><div class="name">Distance from the reference</div>'
        f'<div class="value">{_number(kl["per_sequence"])}</div>'
        '<div class="small quiet">nats of KL an answer</div>'
        f'<div class="small quiet">{_number(kl["low"])} to {_number(kl["high"])} · '
        f"{_count(kl['num_prompts'], 'answer')}</div></div>"
    )
    return '<h2>At a glance</h2>\n<div class="cards">\n' + "\n".join(cards) + "\n</div>"


def _differences(rows: Sequence[Mapping[str, Any]]) -> str:
    """Policy minus reference with whiskers around zero, turned so that the right is better."""
    left, width, row, top = 250, 900, 30, 24
    half = (width - 24 - left) / 2
    turned = []
    for entry in rows:
        value, low, high = (entry[key] for key in ("delta", "delta_low", "delta_high"))
        if not entry["more_is_better"]:
            value, low, high = -value, -high, -low
        turned.append((_title(entry["name"]), value, low, high))
    widest = max((abs(bound) for _, _, low, high in turned for bound in (low, high)), default=0.0)
    reach = next((r for r in (0.05, 0.1, 0.2, 0.3, 0.5) if widest <= r), 1.0)

    def x(value: float) -> str:
        return f"{left + half + half * max(-1.0, min(1.0, value / reach)):.1f}"

    height = top + row * len(turned) + 10
    parts = [
        '<div class="scroll">',
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Difference of policy and reference, with 95 % intervals">',
    ]
    for share in (-1.0, -0.5, 0.0, 0.5, 1.0):
        at, tick = x(share * reach), f"{100 * share * reach:+g} pp".replace("+0 ", "0 ")
        kind = "grid zero" if share == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{at}" x2="{at}" y1="{top}" y2="{height - 6}"/>')
        said = tick.replace("-", "\N{MINUS SIGN}")
        parts.append(
            f'<text class="axis" x="{at}" y="{top - 9}" text-anchor="middle">{said}</text>'
        )
    for number, (name, value, low, high) in enumerate(turned):
        y = f"{top + row * number + row / 2:.1f}"
        kind = "better" if low > 0 else "worse" if high < 0 else "same"
        title = f"{name}: {100 * value:+.1f} points, {100 * low:+.1f} to {100 * high:+.1f}"
        parts.append(
            f'<text x="0" y="{float(y) + 4:.1f}">{escape(name)}</text>'
            f"<g><title>{escape(title)}</title>"
            f'<line class="{kind}" x1="{x(low)}" x2="{x(high)}" y1="{y}" y2="{y}"/>'
            f'<circle class="{kind}" cx="{x(value)}" cy="{y}" r="4.5"/></g>'
        )
    parts.append("</svg></div>")
    note = (
        '<p class="small quiet">policy minus reference in points, with 95 % intervals, turned so '
        "that the right is better; grey: the interval holds zero, so it may be chance</p>"
    )
    return f'<h2 id="differences">Differences</h2>\n{note}\n' + "\n".join(parts)


def _plot(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Dots with whiskers, a row a task, as SVG."""
    left, width, row, top = 250, 900, 38, 24
    right = width - 24
    height = top + row * len(tasks) + 10

    def x(share: float) -> str:
        return f"{left + share * (right - left):.1f}"

    parts = [
        '<div class="scroll">',
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Share of items passed by policy and reference, with 95 % intervals">',
    ]
    for tick in (0, 25, 50, 75, 100):
        at = x(tick / 100)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{top}" y2="{height - 6}"/>')
        parts.append(
            f'<text class="axis" x="{at}" y="{top - 9}" text-anchor="middle">{tick} %</text>'
        )
    for number, task in enumerate(tasks):
        middle = top + row * number + row / 2
        name = task["name"] if len(task["name"]) <= 32 else task["name"][:31] + "…"
        parts.append(f'<text x="0" y="{middle + 4:.1f}">{escape(name)}</text>')
        for who, offset in (("reference", 6), ("policy", -6)):
            found, y = task[who], f"{middle + offset:.1f}"
            low, high = min(1.0, max(0.0, found["low"])), min(1.0, max(0.0, found["high"]))
            said = f"{task['name']}, {who}: {_percent(found['value'])}"
            parts.append(
                f"<g><title>{escape(said)}</title>"
                f'<line class="{who}" x1="{x(low)}" x2="{x(high)}" y1="{y}" y2="{y}"/>'
                f'<circle class="{who}" cx="{x(min(1.0, max(0.0, found["value"])))}" cy="{y}" '
                'r="4.5"/></g>'
            )
    parts.append("</svg></div>")
    key = (
        '<p class="small"><span class="key"><span class="dot"></span>policy</span>'
        '<span class="key"><span class="dot reference"></span>reference</span>'
        '<span class="quiet">share of items passed, with 95 % intervals; to the right is better'
        "</span></p>"
    )
    return f'<h2 id="tasks">Tasks</h2>\n{key}\n' + "\n".join(parts)


def _table(tasks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for task in tasks:
        p_value = "" if task["p_value"] is None else _p(task["p_value"])
        rows.append(
            f"<tr><td>{escape(task['name'])}</td>"
            f'<td class="quiet">{escape(_ROLES.get(task["role"], task["role"]))}</td>'
            f'<td class="number">{task["num_items"]}</td>'
            f'<td class="number">{_with_interval(task["policy"])}</td>'
            f'<td class="number">{_with_interval(task["reference"])}</td>'
            f'<td class="number">'
            f"{_chip(task['delta'], task['delta_low'], task['delta_high'], True)}</td>"
            f'<td class="number">{task["won"]} / {task["lost"]}</td>'
            f'<td class="number">{p_value}</td></tr>'
        )
    head = (
        '<tr><th>task</th><th>what counts</th><th class="number">items</th>'
        '<th class="number">policy</th><th class="number">reference</th>'
        '<th class="number">difference</th><th class="number">gained / lost</th>'
        '<th class="number">p</th></tr>'
    )
    return (
        '<div class="scroll"><table>\n<thead>'
        + head
        + "</thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _kl(report: Mapping[str, Any]) -> str:
    kl = report["kl"]
    return (
        '<h2 id="kl">Distance from the reference</h2>\n'
        f"<p>KL {_number(kl['per_token'])} nats a token, {_number(kl['per_sequence'])} an answer "
        f"(95 %: {_number(kl['low'])} to {_number(kl['high'])}), on "
        f"{_count(kl['num_prompts'], 'answer')} sampled from the policy, "
        f"{kl['num_tokens']:,} tokens. Entropy of the policy: {_number(kl['entropy'])} nats a "
        "token.</p>"
    )


def _regressions(report: Mapping[str, Any]) -> str:
    rows = report["regressions"]
    head = f'<h2 id="regressions">Regressions ({len(rows)})</h2>\n'
    if not rows:
        return head + "<p>No item that the reference passes is failed by the policy.</p>"
    parts = [head, '<p class="quiet">What the reference passes and the policy fails.</p>']
    shown = rows[:_REGRESSIONS]
    for name in dict.fromkeys(row["task"] for row in shown):
        mine = [row for row in shown if row["task"] == name]
        opened = " open" if len(shown) <= 20 or name == shown[0]["task"] else ""
        parts.append(
            f"<details{opened}><summary>{escape(name)} "
            f'<span class="quiet">{len(mine)}</span></summary>'
        )
        parts.extend(_item(row) for row in mine)
        parts.append("</details>")
    if len(rows) > len(shown):
        parts.append(f"<p>{len(rows) - len(shown)} more stand in report.json.</p>")
    return "\n".join(parts)


def _samples(report: Mapping[str, Any]) -> str:
    parts = [
        '<h2 id="samples">Answers side by side</h2>',
        f'<p class="quiet">The first {_SAMPLES} items of each task; report.json holds all.</p>',
    ]
    for name, rows in report["items"].items():
        parts.append(
            f'<details><summary>{escape(name)} <span class="quiet">'
            f"{min(len(rows), _SAMPLES)} of {len(rows)}</span></summary>"
        )
        parts.extend(_item(row) for row in rows[:_SAMPLES])
        parts.append("</details>")
    return "\n".join(parts)


def _item(row: Mapping[str, Any]) -> str:
    answers = []
    for who in ("policy", "reference"):
        found = row[who]
        verdict = "pass" if found["passed"] >= 0.5 else "fail"
        oracle = "" if found["oracle"] is None else f"<span>oracle {found['oracle']:.2f}</span>"
        said = _text(found["answer"]) or '<span class="quiet">(nothing)</span>'
        answers.append(
            f'<div><div class="who"><span class="{verdict}">{who}</span>{oracle}</div>'
            f'<div class="said">{said}</div></div>'
        )
    wanted = f'<div class="small quiet">wanted: {_text(row["target"])}</div>'
    return (
        f'<div class="item"><div class="prompt"><div class="said">{_text(row["prompt"])}</div>'
        f'{wanted}</div><div class="answers">{"".join(answers)}</div></div>'
    )


def _notes(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    limit = settings["limit"]
    return (
        '<h2 id="notes">How to read this</h2>\n'
        '<p class="small">An item is passed when the answer is as it should be: right, refused '
        "where it must be, answered where it must not be refused. Answers are greedy, of at most "
        f"{settings['max_new_tokens']} tokens, asked through the chat template by lm-eval"
        f"{'' if limit is None else f', on the first {limit} items of each task'}. "
        "Intervals are Wilson's for rates and Tango's for differences of paired rates; several "
        "tasks of one role are averaged with equal weight, their intervals combined by the method "
        "of variance estimates recovery. p is McNemar's exact test on the items that only one of "
        "the two passes, and stricter than the interval. A difference is coloured when its "
        "interval leaves out zero. KL is summed over the vocabulary at each token of answers "
        "sampled at temperature 1.</p>"
    )


def _chip(delta: float, low: float, high: float, more_is_better: bool) -> str:
    points = f"{100 * delta:+.1f} pp".replace("+0.0", "0.0").replace("-0.0", "0.0")
    return _chip_of(delta, {"delta_low": low, "delta_high": high}, points, more_is_better)


def _chip_of(
    delta: float, bounds: Mapping[str, float], text: str, more_is_better: bool = True
) -> str:
    """Coloured only when the interval of the difference leaves out zero."""
    low, high = bounds["delta_low"], bounds["delta_high"]
    clear = low > 0 or high < 0
    kind = ("good" if (delta > 0) == more_is_better else "bad") if clear else ""
    title = f"95 %: {100 * low:+.1f} to {100 * high:+.1f} points"
    # A true minus sign lines up with the plus.
    said = text.replace("-", "\N{MINUS SIGN}")
    return f'<span class="chip {kind}" title="{title}">{said}</span>'


def _with_interval(found: Mapping[str, float]) -> str:
    return (
        f"{_percent(found['value'])}<br>"
        f'<span class="small quiet">{_range(found["low"], found["high"])}</span>'
    )


def _range(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.3g}"


def _p(value: float) -> str:
    return "&lt; 0.001" if value < 0.001 else f"{value:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _title(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " ").capitalize())


def _short(report: Mapping[str, Any], who: str) -> str:
    return escape(str(report["models"][who]["artifact"])[:12])


def _text(value: str) -> str:
    cut = value if len(value) <= _CHARACTERS else value[:_CHARACTERS] + " …"
    return escape(cut)
