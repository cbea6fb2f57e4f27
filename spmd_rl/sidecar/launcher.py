"""Start and supervision of this node's sidecar host, on local rank 0."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from spmd_rl.base.errors import RunFailed, UserError, tell
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.frames import receive_frame, start_child
from spmd_rl.sidecar.sockets import remove_socket

# The schema imports Hydra, which a host does not need.
if TYPE_CHECKING:
    from spmd_rl.config.schema import EnvConfig, EnvsConfig, RewardConfig, RewardsConfig

START_SECONDS = 30.0
"""Time beyond `start_seconds` until all servers and a worker per pool must be ready."""
STOP_SECONDS = 1.0
WATCH_SECONDS, MAX_WATCH_SECONDS = 0.1, 0.8
"""Interval of checks of the process, doubled while new hosts die at once."""


def pool_spec(reward: "RewardConfig") -> wire.PoolSpec:
    """Return the worker settings of a domain."""
    return wire.PoolSpec(
        reward.target,
        dict(reward.args),
        reward.workers,
        reward.sandbox,
        reward.cpu_numbers,
        reward.start_seconds,
        packages=reward.packages,
    )


def env_pool_spec(env: "EnvConfig") -> wire.EnvPoolSpec:
    """Return the worker settings of an environment."""
    alone = env.mode == "process"
    return wire.EnvPoolSpec(
        env.target,
        dict(env.args),
        workers=env.workers * env.envs_per_worker if alone else env.workers,
        slots=1 if alone else env.envs_per_worker,
        eval_args=dict(env.eval_args),
        reset_timeout=min(env.reset_timeout, wire.MAX_TIMEOUT),
        step_timeout=min(env.step_timeout, wire.MAX_TIMEOUT),
        memory_mb=env.memory_mb or 0,
        recycle_after=env.recycle_after or 0,
        sandbox=env.sandbox,
        packages=env.packages,
        cpus=env.cpu_numbers,
        start_seconds=env.start_seconds,
    )


def start_message(
    address: str, rewards: "RewardsConfig | None", envs: "EnvsConfig | None", keys: str = ""
) -> wire.StartHost:
    """Return the host's settings. UserError for processors that do not exist."""
    domains, tags = (rewards.domains if rewards else {}), (envs.tags if envs else {})
    for section, settings in {**_keyed("reward", domains), **_keyed("env", tags)}.items():
        if missing := set(settings.cpu_numbers) - os.sched_getaffinity(0):
            raise UserError(f"{section}.cpus={settings.cpus}: this run may not use processor {min(missing)}")
    servers = {
        domain: wire.ServerSpec(reward.server_command, reward.devices.replace("cpu", ""), reward.start_seconds)
        for domain, reward in domains.items()
        if reward.devices is not None
    }
    pools = {domain: pool_spec(reward) for domain, reward in domains.items()}
    return wire.StartHost(0, address, pools, servers, keys, {tag: env_pool_spec(env) for tag, env in tags.items()})


def _keyed(section: str, settings: dict) -> dict:
    return {f"{section}.{name}": one for name, one in settings.items()}


class HostProcess:
    """The host process. A thread replaces a dead host at the same address.

    The host ends when its socket to us closes, when this process dies, or at the latest in `stop`.
    """

    def __init__(
        self, address: str, rewards: "RewardsConfig | None", keys: str = "", envs: "EnvsConfig | None" = None
    ) -> None:
        """UserError for invalid processors or arguments."""
        self._start = start_message(address, rewards, envs, keys)
        pools = {**_keyed("reward", self._start.pools), **_keyed("env", self._start.envs)}
        slowest = max((spec.start_seconds for spec in pools.values()), default=0.0)
        self._start_seconds = slowest * (2 if self._start.servers else 1) + START_SECONDS
        self._lock = threading.Lock()
        self._stopping = False
        self._ended = threading.Event()
        # A thread, since the event loop runs only while this rank has calls under way: a host that died meanwhile would
        # stay dead for the other ranks of the node.
        self._watcher = threading.Thread(target=self._watch, name="sidecar watch", daemon=True)
        try:
            self._launch()
        except wire.WireError as error:
            raise UserError(f"args of {' or '.join(pools)}: {error}") from None

    @property
    def pid(self) -> int:
        """Process id of the present host."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Block until every pool has a worker, then supervise the host.

        UserError if a pool cannot start; RunFailed if the host dies.
        """
        self._socket.settimeout(self._start_seconds)
        try:
            reply = receive_frame(self._socket, wire.FROM_CHILD)
        except TimeoutError:
            reply = wire.StartFailed(f"the sidecar was not ready after {self._start_seconds:g} s")
        if isinstance(reply, wire.Ready):
            self._watcher.start()
            return
        self._end()
        if reply is None:
            raise RunFailed(f"the sidecar host died at its start with code {self._process.returncode}")
        raise UserError(reply.detail)

    def kill(self) -> None:
        """Kill a hanging host; the supervisor starts the next."""
        self._process.kill()

    def stop(self) -> None:
        """End the host and its workers; remove its socket."""
        with self._lock:
            self._stopping = True
        self._end()
        self._ended.set()
        if self._watcher.is_alive():
            self._watcher.join()
        remove_socket(self._start.address)

    def _watch(self) -> None:
        pause = WATCH_SECONDS
        while not self._ended.wait(pause):
            if self._process.poll() is None:
                pause = WATCH_SECONDS
                continue
            # Without memory or processes the start fails; the next check tries again.
            with self._lock, contextlib.suppress(OSError):
                if not self._stopping:
                    code = self._process.returncode
                    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
                    tell(f"sidecar: the host died {how}; starting a new one")
                    self._socket.close()
                    self._launch()
            pause = min(2 * pause, MAX_WATCH_SECONDS)

    def _launch(self) -> None:
        # The parent-death signal follows the thread that forks: it must last as long as the host.
        lasting = threading.current_thread() in (threading.main_thread(), self._watcher)
        message = msgspec.structs.replace(self._start, parent=os.getpid() if lasting else 0)
        # What can be imported here can be imported there.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        self._process, self._socket = start_child("spmd_rl.sidecar", message, environment)

    def _end(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        self._process.wait()
