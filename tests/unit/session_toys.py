"""Environments that misbehave, for the tests of sessions: each imported by a worker, never by the test process."""

import asyncio
import math
import os
import random
import signal
import sys
import threading
import time

HELD: list = []


class Counts:
    """Adds up what it is told; ends at its goal. The seed is where it begins."""

    def __init__(self, goal: int = 1000, seconds: float = 0.0) -> None:
        self.goal, self.seconds, self.total = goal, seconds, 0

    def reset(self, seed):
        self.total = seed % 1000
        return f"at {self.total}", {"instruction": f"reach {self.goal}"}

    def step(self, action):
        if self.seconds:
            time.sleep(self.seconds)
        self.total += len(action)
        done = self.total >= self.goal
        return f"at {self.total}", float(done), done, False, {"metrics": {"success": float(done)}}


class Moody:
    """Does what the action says."""

    def __init__(self, mood: str = "") -> None:
        self.mood = mood
        self.closed = None

    def reset(self, seed):
        word, _, rest = self.mood.partition(" ")
        if word == "sleep" and seed == 13:
            time.sleep(float(rest))
        if word == "die" and seed == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 404:
            return None, {}
        return f"{os.getpid()} {threading.get_native_id()}", {}

    def step(self, action):
        word, _, rest = action.partition(" ")
        reply = ["fine", 1.0, False, False, {}]
        if word == "raise":
            raise KeyError("no such\nthing")
        if word == "sleep":
            time.sleep(float(rest))
        if word == "spin":  # holds the interpreter's lock now and then
            until = time.monotonic() + float(rest)
            while time.monotonic() < until:
                pass
        if word == "stop":  # the process as a whole
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)  # threads run on for a moment
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "exit":
            sys.exit(3)
        if word == "hold":
            HELD.append(bytearray(int(rest) << 20))
        if word == "debug":
            breakpoint()  # noqa: T100 - what is tested
        if word == "return":
            reply = eval(rest)  # noqa: S307 - a test's own text
        return reply

    def close(self):
        if self.mood.startswith("tell "):
            with open(self.mood[5:], "a") as file:
                file.write("closed\n")


class Async:
    """Naps without blocking."""

    async def reset(self, seed):
        await asyncio.sleep(0.01)
        return "begun", {}

    async def step(self, action):
        await asyncio.sleep(0.01)
        return action, 0.5, False, False, {}


class OnlyReset:
    def reset(self, seed):
        return "", {}


def make(goal: int):
    """A function in place of a class."""
    return Counts(goal)


class NeedsSandbox:
    def __init__(self, sandbox, http) -> None:
        self.sandbox, self.http = sandbox, http

    def reset(self, seed):
        return type(self.http).__name__, {}

    def step(self, action):
        result = self.sandbox.run(action)
        return result.stdout, 0.0, False, False, {}


class Slow:
    """A pure function of seed and actions, after log-normal naps; now and then a step hangs, or its process dies."""

    def __init__(self, median: float, sigma: float, hangs: float, dies: float) -> None:
        self.median, self.sigma, self.hangs, self.dies = median, sigma, hangs, dies
        self.chance = random.SystemRandom()
        self.total = 0

    def nap(self) -> None:
        if self.chance.random() < self.hangs:
            time.sleep(3600)
        if self.chance.random() < self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.chance.lognormvariate(math.log(self.median), self.sigma))

    def reset(self, seed):
        self.nap()
        self.total = seed
        return f"at {self.total}", {}

    def step(self, action):
        self.nap()
        self.total = (31 * self.total + len(action)) % 1_000_003
        return f"at {self.total}", float(self.total % 2), False, False, {"metrics": {"success": 1.0}}


class Gone:
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, seed):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}


def not_one():
    """A function that makes no environment."""
    return object()
