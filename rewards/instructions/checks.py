"""Checks of instructions in a text: IFEval's, and those of RLVR-IFEval. Each returns True if the text follows it."""

import json
import re
from collections.abc import Callable, Sequence

from langdetect import DetectorFactory, LangDetectException, detect
from nupunkt import sent_tokenize

# Without a seed langdetect's results are random.
DetectorFactory.seed = 0
RELATIONS: dict[str, Callable[[int, int], bool]] = {"less than": int.__lt__, "at least": int.__ge__}


def _language(text: str, language: str) -> bool:
    try:
        return detect(text) == language
    except LangDetectException:
        # As in the original: a text without a detectable language breaks no rule.
        return True


def _parts(text: str, separator: str) -> list[str] | None:
    """Return the parts between separators without empty ones at the ends; None if there is an empty one elsewhere."""
    parts = [part.strip() for part in re.split(separator, text)]
    return [part for part in parts if part] if all(parts[1:-1]) else None


def keyword_existence(text: str, keywords: Sequence[str]) -> bool:
    """Return True if each keyword occurs, in any case."""
    return all(keyword.lower() in text.lower() for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Return True if a keyword occurs less often than, or at least, `frequency` times."""
    return RELATIONS[relation](text.lower().count(keyword.strip().lower()), frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """Return True if none of these occurs as a separate word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return True if a character occurs less often than, or at least, `let_frequency` times."""
    return RELATIONS[let_relation](text.lower().count(letter.lower()), let_frequency)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Return True for fewer than, or at least, `num_sentences` sentences."""
    return RELATIONS[relation](len(sent_tokenize(text)), num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return True for exactly `num_paragraphs` paragraphs with `***` between them."""
    paragraphs = _parts(text, r"\*\*\*")
    return paragraphs is not None and len(paragraphs) == num_paragraphs


def number_words(text: str, num_words: int, relation: str) -> bool:
    """Return True for fewer than, or at least, `num_words` words."""
    return RELATIONS[relation](len(re.findall(r"\w+", text)), num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return True for `num_paragraphs` paragraphs with blank lines between them, one of which begins with this word."""
    paragraphs = text.split("\n\n")
    if sum(bool(part.strip()) for part in paragraphs) != num_paragraphs or nth_paragraph > len(paragraphs):
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """Return True for at least `num_placeholders` `[placeholders]`."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """Return True for a postscript after this marker; `P.S.` and `P.P.S` may have spaces between the letters."""
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Return True for exactly `num_bullets` lines that begin with `* ` or `-`."""
    return len(re.findall(r"^\s*(?:\*[^*].*|-.*)$", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    """Return True for one of the three allowed answers."""
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Return True for at least `num_highlights` *highlighted* or **highlighted** pieces of a line."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(piece.strip()) for piece in single + double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Return True for at least `num_sections` sections, each headed by the word and a number."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """Return True if the whole text is JSON, possibly in a fence."""
    fenced = re.fullmatch(r"```(?:json|Json|JSON)?(.*?)(?:```)?", text.strip(), re.DOTALL)
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Return True if the text has a <<title>>."""
    return any(found.strip("<> ") for found in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Return True for two different answers with `******` between them."""
    parts = _parts(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Return True if the text begins with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """Return True if the text ends with this phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """Return True if the text is in double quotation marks."""
    return re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Return True for fewer than, or at least, `capital_frequency` words in capitals."""
    words = re.findall(r"[^\W_]+(?:['.&-][^\W_]+)*", text)
    return RELATIONS[capital_relation](sum(word.isupper() for word in words), capital_frequency)


def english_capital(text: str) -> bool:
    """Return True for English in capitals alone."""
    return text.isupper() and _language(text, "en")


def english_lowercase(text: str) -> bool:
    """Return True for English without a capital."""
    return text.islower() and _language(text, "en")


def no_comma(text: str) -> bool:
    """Return True for a text without commas."""
    return "," not in text


def counted(number: int, wanted: int, quantifier: str | None = None, slack: int = 0) -> bool:
    """Return True if `number` is `at least`, `at most` or `around` (within `slack`) the wanted one, or equal to it."""
    return {"at least": number >= wanted, "at most": number <= wanted, "around": abs(number - wanted) <= slack}[
        quantifier or "around"
    ]


def word_count(text: str, N: int, quantifier: str) -> bool:
    """Return True for a number of words; around it means within a tenth."""
    return counted(len(text.split()), N, quantifier, max(round(N / 10), 1))


def sentence_count(text: str, N: int, quantifier: str) -> bool:
    """Return True for a number of sentences; around it means within one."""
    return counted(len(sent_tokenize(text)), N, quantifier, 1)


def capitals_count(text: str, N: int, quantifier: str) -> bool:
    """Return True for a number of words in capitals."""
    return counted(len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier)


def paragraph_count(text: str, N: int) -> bool:
    """Return True for exactly `N` paragraphs with `* * *` between them."""
    paragraphs = text.split("* * *")
    return len(paragraphs) == N and all(map(str.strip, paragraphs))


def section_count(text: str, N: int, section_splitter: str) -> bool:
    """Return True for exactly `N` sections, each of which begins with the splitter."""
    first, *others = text.strip().split(section_splitter)
    return len(others) + bool(first.strip()) == N


CHECKERS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keyword_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""Checks by IFEval's names"""
FUNCTIONS: dict[str, Callable[..., bool]] = {
    "verify_keywords": lambda text, keyword_list: keyword_existence(text, keyword_list),
    "verify_keyword_frequency": lambda text, word, N: counted(
        len(re.findall(rf"\b{re.escape(word.strip())}\b", text, re.IGNORECASE)), N
    ),
    "validate_forbidden_words": forbidden_words,
    "verify_letter_frequency": lambda text, letter, N: counted(text.count(letter), N),
    "validate_response_language": _language,
    "verify_paragraph_count": paragraph_count,
    "validate_word_constraint": word_count,
    "verify_sentence_constraint": sentence_count,
    "validate_paragraphs": lambda text, N, first_word, i: nth_paragraph_first_word(text, N, i, first_word),
    "verify_postscript": postscript,
    "validate_placeholders": lambda text, N: number_placeholders(text, N),
    "verify_bullet_points": lambda text, N: number_bullet_lists(text, N),
    "validate_title": title,
    "validate_choice": lambda text, options: any(text.strip() == option.strip() for option in options),
    "validate_highlighted_sections": lambda text, N: number_highlighted_sections(text, N),
    "validate_sections": section_count,
    "validate_json_format": json_format,
    "validate_repeat_prompt": lambda text, original_prompt: repeat_prompt(text, original_prompt),
    "validate_two_responses": two_responses,
    "validate_uppercase": english_capital,
    "validate_lowercase": english_lowercase,
    "validate_frequency_capital_words": capitals_count,
    "validate_end": end_checker,
    "validate_quotation": quotation,
    "validate_no_commas": no_comma,
}
"""Checks by RLVR-IFEval's names, of which some count exactly or allow a margin"""
