"""Checks of each engine: start, weights published with a probe, generated answers, memory returned in sleep."""

import time
from array import array

from spmd_rl.config.engines import facts_of
from spmd_rl.tools.doctor.bench import Bench
from spmd_rl.tools.doctor.checks import ENGINE, REPORT, Failed, check_package
from spmd_rl.types import Request

REQUESTS, PROMPT, NEW_TOKENS = 8, 32, 32


def start(name: str, bench: Bench) -> str:
    """[all] Start an engine with the tiny model."""
    facts = facts_of(name)
    if facts.package:
        check_package(facts.package, facts.title, ENGINE.format(facts.installation), "engine=native")
    began = time.perf_counter()
    capacity = bench.engine(name).capacity  # [all]
    return f"started in {time.perf_counter() - began:.1f} s, {capacity.max_running} requests at once"


def publish(name: str, bench: Bench) -> str:
    """[all] Publish weights; their bytes are compared, and a probe compares logprobs with the trainer's."""
    metrics = bench.publish(name)  # [all]
    difference, seconds = metrics["publish/probe_abs_diff"], metrics["publish/seconds"]
    return f"probe: logprobs within {difference:.1e} of the trainer's; {seconds:.2f} s"


def generate(name: str, bench: Bench) -> str:
    """[all] Generate greedy answers to a few prompts."""
    engine = bench.engine(name)
    began = time.perf_counter()
    with engine.awake():
        answers = _answers(engine)
    seconds = time.perf_counter() - began
    bench.answers[name] = answers
    tokens = sum(map(len, answers))
    if len(answers) != REQUESTS or not all(answers):
        raise Failed(f"{len(answers)} of {REQUESTS} requests were answered, {tokens} tokens", REPORT)
    return f"{tokens} tokens of {REQUESTS} requests, {tokens / seconds:.0f} tokens/s"


def _answers(engine) -> list[list[int]]:
    for number in range(REQUESTS):
        prompt = array("i", [3 + (13 * i + 17 * number) % 500 for i in range(PROMPT)])
        engine.add(Request(f"doctor-{number}", prompt, NEW_TOKENS, 0.0, seed=0, order=(0, number, 0)))
    found = {}
    while engine.num_unfinished:
        found |= {completion.id: completion.token_ids.tolist() for completion in engine.step()}
    return [found[name] for name in sorted(found)]


def sleep(name: str, bench: Bench) -> str:
    """[all] Let the engine return its memory, wake it, publish again: its answers must be the same."""
    engine, began = bench.engine(name), time.perf_counter()
    for _ in range(2):
        engine.sleep()
        with engine.awake():
            pass
    seconds = (time.perf_counter() - began) / 2
    bench.publish(name)  # [all]
    with engine.awake():
        answers = _answers(engine)
    # In bfloat16 two tokens may be equally likely to the last bit.
    if bench.cfg.policy.dtype == "float32" and answers != bench.answers.get(name, answers):
        raise Failed("answers differ after sleep, wake and publish of the same weights", REPORT)
    where = ", nothing moves on the CPU" if bench.world.device.type == "cpu" else ""
    return f"{1000 * seconds:.0f} ms there and back{where}"
