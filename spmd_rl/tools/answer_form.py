"""The form in which a prompt asks for its answer, to be filled with a known one.

    asked_forms(prompt, "{question}\\nPut the final answer in \\\\boxed{}.")  # ["\\\\boxed{\\0}"]
    fill("\\\\boxed{\\0}", "18")  # "\\\\boxed{18}"

Recognised are boxes, `#### n`, tags, quoted or labelled lines (`"The answer is X."`, `Answer: $Answer`), `[[X]]`,
fenced blocks and JSON objects, after thoughts if asked for.
"""

import json
import re
from collections.abc import Iterator

from spmd_rl.types import PICTURE, Prompt

SLOT, JSON_SLOT = "\0", "\1"
"""Placeholders in a form: the answer, and the answer as JSON"""
THOUGHT = "Let me think step by step."
NAMES = r"answer|solution|result|output|final|response|verdict|rating|score|choice|\bans\b"
THINKS = re.compile(
    r"step[- ]by[- ]step|(?:show|write|explain|give|include) (?:all |your |the )*(?:work|steps|reasoning|thoughts)"
    r"|\b(?:think|reason) (?:first|carefully|before|through|about it|aloud|out)|\blast line\b",
    re.IGNORECASE,
)
ONLY = re.compile(r"\b(?:only|nothing else|no explanation)\b", re.IGNORECASE)
NEGATED = re.compile(r"(?:(?:\bnot|n't|\bnever|\bwithout|\bavoid|instead of)\b(?! forget)[^.;:,\n]{0,28}|\bno )$", re.I)
MARKED = {
    r"\\boxed\b|\\fbox\b": "\\boxed{\0}",
    r"(?<!#)####(?!#)": "#### \0",
    r"\[\[[A-Za-z ]+\]\]": "[[\0]]",
}
"""Forms recognised by a single mark"""
FENCE = re.compile(r"```(\w*)|\bfenced|\bcode block|triple backticks")
QUOTED = re.compile("(?<!\\w)[\"'`\u201c\u2018]([^\"'`\u201d\u2019\n]{1,80})[\"'`\u201d\u2019](?!\\w)")
BLANK = r"\$\w+|<[^<>\n]+>|\[[^\[\]\n]+\]|\{[^{}\n]*\}|\.{3}|\u2026|_{2,}|\\boxed(?:\{[^{}\n]*\})?|\bX\b|\b[A-Z]{2,}\b"
"""Placeholders of an answer in a line"""
LABEL = r"(?:[#*]+ ?)?(?:the )?(?:(?:final|correct) )?(?:answer|result|solution)(?:\**\s*[:=]\**|\s+is:?)\s*"
LABELLED = re.compile(rf"((?i:{LABEL})\(?)({BLANK})(\)?)")
LEAD = re.compile(r"(.*(?::|=|->|\bis\b)[ *(]*)(.*)", re.DOTALL)
PAIR = re.compile(r"<(\w+)>(\s*)(?:(?!<\1>).)*?</\1>", re.DOTALL)
NAMED_TAG = re.compile(r"<(\w+)>()(?=[^.<>\n]{0,15}\btags?\b)")
THINKING = re.compile(r"think|reason|thought|scratch|work|analysis|explanation|plan|steps", re.IGNORECASE)


def asked_forms(prompt: Prompt, template: str = "{question}") -> list[str]:
    """Return the forms that the prompt asks for, any of which is valid; none if it names none.

    `template` (`data.format`) and system messages come first; the row's text counts only if these name no form.
    """
    said = [(m.role, m.plain_text.replace(PICTURE, "")) for m in prompt.messages if m.role != "assistant"]
    system = [text for role, text in said if role == "system"]
    parts = template.split("{question}")
    ours = said and said[-1][1].startswith(parts[0]) and said[-1][1].endswith(parts[-1])
    own = "\n".join([*system, *(parts if ours else ())])
    return _forms(own, any_tag=True) or _forms("\n".join(text for _, text in said))


def fill(form: str, answer: str) -> str:
    """Return an answer in a form; unchanged if already so marked."""
    if any(mark in form and mark in answer for mark in ("\\boxed", "####", "<answer>")) or "```" in answer:
        return answer
    return form.replace(SLOT, answer).replace(JSON_SLOT, json.dumps(answer))


def shown(form: str) -> str:
    """Return a form with dots for the answer, without thoughts."""
    return form.removeprefix(f"{THOUGHT}\n").replace(SLOT, "...").replace(JSON_SLOT, '"..."')


def _forms(text: str, any_tag: bool = False) -> list[str]:
    forms, around = list(dict.fromkeys(_marked(text))), _tags(text, any_tag)
    if around:
        forms = [around.replace(SLOT, form) for form in forms or [SLOT]]
    if THINKS.search(text) and not ONLY.search(text):
        forms = [form if THOUGHT in form else f"{THOUGHT}\n{form}" for form in forms or [SLOT]]
    return forms


def _shown(pattern: str | re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return (found for found in re.finditer(pattern, text) if not NEGATED.search(text[: found.start()]))


def _marked(text: str) -> Iterator[str]:
    if re.search("json", text, re.IGNORECASE):
        yield from _json(text)
    for found in _shown(LABELLED, text):
        yield found[1] + ("\\boxed{\0}" if "\\boxed" in found[2] else SLOT) + found[3]
    for found in _shown(QUOTED, text):
        if (line := LEAD.fullmatch(found[1])) and re.search(rf"{NAMES}|####", line[1], re.IGNORECASE):
            lead, rest = line.groups()
            end = ")" * lead.endswith("(") + "." * (rest.endswith(".") and not rest.endswith(".."))
            yield (
                lead
                + " " * lead[-1:].isalnum()
                + " " * lead.endswith((":", "=", ">"))
                + ("\\boxed{\0}" if "\\boxed" in rest else SLOT)
                + end
            )
    yield from (form for pattern, form in MARKED.items() if any(_shown(pattern, text)))
    if fence := next(_shown(FENCE, text), None):
        yield f"```{fence[1] or ''}\n\0\n```"


def _json(text: str) -> Iterator[str]:
    objects = [re.findall(r"[\"'](\w+)[\"']\s*:", found[0]) for found in _shown(r"\{[^{}]*\}", text)]
    described = re.findall(r"\b(?:keys?|fields?)\b[^.\n]*", text)
    for keys in [*objects, *(re.findall(r"[\"'`](\w+)[\"'`]", words) for words in described)]:
        if answers := [key for key in keys if re.search(NAMES, key, re.IGNORECASE)]:
            # The answer may be a text or a number.
            for slot in (JSON_SLOT, SLOT):
                values = {key: slot if key == answers[-1] else json.dumps(THOUGHT) for key in keys}
                yield "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in values.items()) + "}"


def _tags(text: str, any_tag: bool) -> str:
    """Return the text's tags, filled with a thought or the slot.

    any_tag: accept any name for the answer's tag, not only a telling one; a question may be full of HTML.
    """
    tags = {found[1]: "\n" * ("\n" in found[2]) for found in (*_shown(NAMED_TAG, text), *_shown(PAIR, text))}
    names = sorted(tags, key=lambda name: text.index(f"<{name}>"))
    for_answer = [name for name in names if not THINKING.search(name)]
    answers = [name for name in for_answer if re.search(NAMES, name, re.IGNORECASE)] or for_answer * any_tag
    used = [name for name in names if THINKING.search(name) or name in answers[-1:]]
    out = ""
    for name in used:
        between = re.findall(rf"</{out.rpartition('</')[2][:-1]}>(\s*)<{name}>", text) if out else [""]
        inside = SLOT if name in answers else THOUGHT
        out += (between or ["\n"])[-1] + f"<{name}>{tags[name]}{inside}{tags[name]}</{name}>"
    return out if not out or SLOT in out else f"{out}\n{SLOT}"
