"""The cluster on Ray: a worker is an actor (`cluster.process`), and what they say to each other are calls of Ray. Only
here is ray imported.

Ray places the actors, sees when one dies, starts it again, and carries what is sent: keys and values in its object store and
its transfer between nodes, and on a node the word where they lie (`cluster.slots`). Actors rather than Ray Serve: the HTTP
server, its admission and its router are the engine's own, and every hop more is a hop more per token.

Whoever reaches Ray's ports can run code on its machines: Ray trusts its network, and says so. On one machine everything
listens on loopback; between machines give it a network of its own.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from diptych.cluster.autoscale import Autoscaler
from diptych.cluster.core import ClusterCore
from diptych.cluster.link import DoorLink
from diptych.cluster.messages import Hello
from diptych.cluster.pool_config import OnCores, PoolConfig, crowding
from diptych.cluster.process import POLL_S, WorkerProcess
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.cost.shared_machine import judge
from diptych.engine.adapters import Adapters
from diptych.engine.async_llm import AsyncLLM
from diptych.engine.encoder import open_encoder
from diptych.engine.engine import Engine
from diptych.engine.load import BUNDLED_MODEL, LoadedModel, model_dir
from diptych.engine.spans import FLUSH_S
from diptych.engine.text.words import words_of
from diptych.ground.clock import Clock, MonotonicClock
from diptych.ground.config import EngineConfig
from diptych.ground.errors import ConfigError, EngineError, LoadError, RequestError
from diptych.ground.hosts import is_loopback
from diptych.ground.version import VERSION

logger = logging.getLogger("diptych.cluster")

HUNG_S = 30.0  # a process that says nothing for so long, not even that there is nothing to say, is given up
LOOK_S = 1.0  # between looks at the load, where pools follow it
AGAIN_S = 5.0  # until a worker is begun once more that could not begin
CONNECT_S = 5.0
START_S = 600.0  # a large model takes minutes to load


def actor_class(process: type[WorkerProcess] = WorkerProcess) -> Any:
    """Methods of a group run in order on a thread of their own, so a long fetch holds up no message."""
    for group, names in (("door", ("hello", "meet", "tell", "leave")), ("links", ("give",)), ("news", ("fetch",))):
        for name in names:
            setattr(process, name, ray.method(concurrency_group=group)(getattr(process, name)))
    remote: Any = ray.remote
    return remote(concurrency_groups={"door": 1, "links": 1, "news": 1})(process)


WorkerActor = actor_class()


class RayCluster:
    """Workers on Ray and the door before them; `llm` is what a server serves. `close` ends what was started here."""

    def __init__(self, model: str, config: EngineConfig, pools: PoolConfig) -> None:
        """Returns when every worker is ready. Raises ConfigError or LoadError, with nothing left running."""
        self._pools = pools
        self._is_closing, self._scaling = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self.clock: Clock = MonotonicClock()
        self.core = ClusterCore(
            now_s=self.clock.now_s, seed=config.seed, local_prefill_tokens=pools.local_prefill_tokens
        )
        self.actors: dict[str, Any] = {}
        self._leaving: set[str] = set()  # of them, those that end when what they have is over
        self.hellos: dict[str, Hello] = {}
        self._model, self._config = model, config
        self._engines = pools.engines(config, cores=psutil.cpu_count(logical=False) or 1)
        begin_s = self.clock.now_s()
        self._start_ray()
        try:
            self._start(pools.names)
            self._check_states(pools)
            for name in pools.names:
                self._attach(name, _clock_ahead_s(self.actors[name], self.clock))
            self.llm = self._make_llm(begin_s)
            self.llm.scale = self._scale
            if not self._tell_crowding() and pools.address is None:
                self._tell_whether_it_pays()
        except BaseException:
            self.close()
            raise
        for name in pools.names:
            self._follow(name)
        if pools.bounds:
            self._thread(self._follow_load, "diptych-autoscale")

    def close(self) -> None:
        """End the workers, and Ray where it was started here."""
        self._is_closing.set()
        actors, self.actors = self.actors, {}
        self._end(list(actors.values()))
        ray.shutdown()
        for thread in self._threads:
            thread.join(timeout=2 * POLL_S)

    def _check_states(self, pools: PoolConfig) -> None:
        pools.check_states(next(iter(self.hellos.values())).card.spec, self._config)

    def _start_ray(self) -> None:
        options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False, "namespace": "diptych"}
        if self._pools.address is not None:
            try:
                _knock(self._pools.address)
                ray.init(address=self._pools.address, **options)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"no Ray cluster at {self._pools.address}: {_reason(error)}",
                    hint="ray start --head begins one, RAY_AUTH_MODE=token has its key sent (docs/cluster.md); without "
                    "--ray-address one begins here by itself",
                ) from error
            logger.warning(
                "ray trusts its network: whoever reaches its ports can run code on its machines, and read keys and values "
                "on their way; give it a network of its own (docs/cluster.md)"
            )
            return
        if ray.is_initialized():
            return  # by the program that uses us, such as a test with nodes of its own
        try:
            ray.init(
                address="local",  # not one that somebody else has started on this machine
                num_cpus=1,  # workers of this machine ask for none: they divide its cores as --threads says
                num_gpus=None if any(self._needs(pool) for pool in self._engines) else 0,  # None: Ray counts them
                object_store_memory=self._pools.object_store_bytes,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                **options,
            )
        except Exception as error:  # Ray's is no narrower
            raise LoadError(
                f"Ray did not start on this machine: {_reason(error)}",
                hint="it needs a few seconds of processor time within half a minute, and memory in /dev/shm; "
                "/tmp/ray/session_latest/logs has its own words",
            ) from error
        address = ray.util.get_node_ip_address()
        if not is_loopback(address):
            logger.warning("ray listens on %s: call ground.config.quiet_ray before ray is imported", address)

    def _start(self, names: Sequence[str]) -> None:
        needs = [self._needs(name.partition("-")[0]) for name in [*self.actors, *names]]
        check_there_is(sum(map(Counter, needs), Counter()), ray.cluster_resources())
        for name in names:
            self.actors[name] = self._new_actor(name)
        for name in names:
            try:
                self.hellos[name] = ray.get(self.actors[name].hello.remote(), timeout=START_S)
            except RayError as error:
                reason, hint = _said(error)
                where = "is the model on every node under that path, and has the cluster a CPU for every worker?"
                raise LoadError(f"worker {name} did not start: {reason}", hint=hint or where) from error
            check_version(name, self.hellos[name].version)
        self._introduce()

    def _new_actor(self, name: str) -> Any:
        pool, is_local = name.partition("-")[0], self._pools.address is None
        needs, share = self._needs(pool), self._pools.most if is_local else 1
        return WorkerActor.options(
            num_cpus=0 if is_local else 1,
            num_gpus=needs.get("GPU", 0),
            resources={of_ray: n for of_ray, n in needs.items() if of_ray != "GPU"},
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        ).remote(name, self._model, self._engines[pool], share, self._pools, _node_id, logger.getEffectiveLevel())

    def _introduce(self) -> None:
        """Tell every worker where the others are."""
        actors = dict(self.actors)
        for actor in actors.values():
            actor.meet.remote(actors)

    def _needs(self, pool: str) -> dict[str, int]:
        """What a worker takes of Ray's resources, besides a CPU."""
        node = self._pools.places[pool].node
        needs = {} if node is None else {node: 1}
        return needs | {"GPU": 1} if self._engines[pool].compute.device.startswith("cuda") else needs

    def _attach(self, name: str, clock_ahead_s: float) -> None:
        hello = self.hellos[name]
        card, link = hello.card, DoorLink(self.actors[name], hello.incarnation)
        logger.info(
            "worker engine name=%s backend=%s kernels=%s threads=%d",
            name, card.backend_name, card.instruction_set, card.threads,
        )  # fmt: skip
        has_prices = all(one.speeds or one.probed for one in self.hellos.values())
        self.core.attach(
            link,
            hello.facts,
            decodes=name.startswith("decode"),
            clock_ahead_s=clock_ahead_s,
            price=hello.speeds or hello.probed if has_prices else None,
        )

    def _make_llm(self, begin_s: float) -> AsyncLLM:
        directory = model_dir(self._model)
        tokenizer, template = words_of(directory)
        card = next(iter(self.hellos.values())).card
        revisions = {one.card.revision for one in self.hellos.values()}
        if len(revisions) > 1 and self._pools.takes_other_kernels:
            logger.warning(
                "workers have %d kinds of kernels, and take each other's keys and values: answers are equal within "
                "tolerance only, and depend on which worker read a prompt", len(revisions),
            )  # fmt: skip
        elif len(revisions) > 1:
            logger.warning(
                "workers have %d kinds of kernels: keys and values are not handed over between them, and answers depend "
                "in their last bits on which worker writes them", len(revisions),
            )  # fmt: skip
        if len(revisions) > 1:
            card = replace(card, revision="")
        encoder = open_encoder(directory, card.hf_config, tokenizer, template, task=self._config.task, spec=card.spec)
        load_s = self.clock.now_s() - begin_s
        loaded = LoadedModel(
            name=BUNDLED_MODEL if self._model == "bundled" else self._model,
            directory=directory,
            model=card,  # type: ignore[arg-type]  # what a server reads of it is all there
            tokenizer=tokenizer,
            template=template,
            checkpoint_s=load_s,
            load_s=load_s,
            clock=self.clock,
            compute=self._config.compute,
            encoder=encoder,
        )
        engine = Engine(
            self.core,  # type: ignore[arg-type]  # in EngineCore's place
            None,  # type: ignore[arg-type]  # there are no plans
            tokenizer,
            clock=self.clock,
            vocab_size=card.spec.vocab_size,
            grammars=GrammarCompiler(tokenizer, card.spec.vocab_size),
            adapters=Adapters(loaded.model, max_loras=0, max_rank=0),
            writes=card.spec.has_head,
            encodes=encoder is not None,
        )
        llm = AsyncLLM(loaded, self._config, engine=engine)
        llm.unpredicted = self._unpredicted
        return llm

    def _unpredicted(self) -> str | None:
        gaps = ((name, hello.gap) for name, hello in list(self.hellos.items()))
        return next((f"{name}: {gap}" for name, gap in gaps if gap is not None), self._crowding())

    def _crowding(self) -> str | None:
        there = [self.hellos[name] for name in list(self.actors) if name in self.hellos]
        return crowding(OnCores(one.facts.name, one.facts.node, one.card.threads, one.cores) for one in there)

    def _tell_crowding(self) -> bool:
        words = self._crowding()
        if words is not None:
            logger.warning("%s; each is slower than predicted. Fewer --threads, or threads=N in --prefill-on", words)
        return words is not None

    def _scale(self, pool: str, number: int) -> None:
        """Begin to have a pool of that many workers; returns at once. RequestError where there may be none."""
        if self._pools.bounds:
            raise RequestError(
                "pools follow the load here", hint="leave out --max-prefill, --max-decode and --max-workers"
            )
        if pool == "prefill" and number:
            try:
                self._check_states(replace(self._pools, prefill=number))
            except ConfigError as error:
                raise RequestError(error.message, hint=error.hint) from error
        logger.info("pool=%s wanted=%d", pool, number)
        self._thread(partial(self._scale_to, pool, number), f"diptych-scale-{pool}")

    def _thread(self, target: Callable[[], object], name: str) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()

    def _follow_load(self) -> None:
        """Have as many workers as the load needs, one change after the other."""
        pools = self._pools
        scaler = Autoscaler(pools.bounds, target_s=pools.target_queue_s, calm_s=pools.calm_s)
        while not self._is_closing.wait(LOOK_S):
            for pool in scaler.bounds:
                n_workers = sum(name.startswith(pool) for name in self.actors.keys() - self._leaving)
                work_s = self.core.work_s(decodes=pool == "decode")
                wanted = scaler.wanted(pool, n_workers=n_workers, work_s=work_s, now_s=self.clock.now_s())
                if wanted != n_workers:
                    logger.info("pool=%s workers=%d wanted=%d work_s=%.3g", pool, n_workers, wanted, work_s)
                    self._scale_to(pool, wanted)

    def _scale_to(self, pool: str, number: int) -> None:
        with self._scaling:
            wanted = [f"{pool}-{i}" for i in range(number)]
            new = [name for name in wanted if name not in self.actors]
            gone = [name for name in self.actors if name.startswith(pool) and name not in {*wanted, *self._leaving}]
            for name in self._leaving.intersection(wanted):
                self._leaving.remove(name)
                self._do(partial(self.core.keep, name))
            try:
                self._start(new)
                ahead_s = {name: _clock_ahead_s(self.actors[name], self.clock) for name in new}
            except (LoadError, RayError) as error:
                logger.error("pool=%s does not grow: %s", pool, getattr(error, "message", None) or _reason(error))
                for name in self.actors.keys() & set(new):
                    ray.kill(self.actors.pop(name))
                return
            for name in new:
                self._do(partial(self._attach, name, ahead_s[name]))
            if new:
                self._tell_crowding()
            for name in gone:
                self._leaving.add(name)
                self._do(partial(self.core.drain, name))
            self._await_done()
            for name in new:
                self._follow(name)
            for name in gone:  # streams may take minutes, in which a pool may have to grow
                self._thread(partial(self._let_go, name), f"diptych-leaves-{name}")

    def _let_go(self, name: str) -> None:
        """End a worker that gets nothing new, when it has nothing left, unless it is wanted again before."""
        actor = None
        while actor is None:
            if self._is_closing.wait(POLL_S / 5):
                return
            with self._scaling:
                if name not in self._leaving:
                    return
                if not self.core.n_open_at(name):
                    self._leaving.remove(name)
                    actor = self.actors.pop(name, None)
                    self._do(partial(self.core.detach, name))
        self._end([actor])

    def _end(self, actors: list[Any]) -> None:
        if actors and self._pools.otlp_traces_endpoint is not None:
            ray.wait([actor.leave.remote() for actor in actors], num_returns=len(actors), timeout=FLUSH_S)
        for actor in actors:
            ray.kill(actor)

    def _tell_whether_it_pays(self) -> None:
        pools, hello = self._pools, self.hellos[self._pools.names[0]]
        hello = next((one for one in self.hellos.values() if one.speeds is None), hello)
        if hello.speeds is None and not pools.prefill:
            logger.warning(
                "workers on one machine do not pay: they share its cores and read all weights each; one engine answers as many"
            )
            return
        if hello.speeds is None:
            logger.warning("whether pools pay on this machine is not known: %s", hello.gap)
            return
        most = self._config.scheduler.max_step_tokens
        found = judge(hello.speeds, prefill=pools.prefill, decode=pools.decode, max_step_tokens=most)
        logger.log(
            logging.INFO if found.pays else logging.WARNING,
            "workers on one machine %s: predicted requests/s one_engine=%.3g workers_at_best=%.3g, "
            "longest gap of a stream beside prompts one_engine=%.3g s workers=%.3g s (--stall-budget-ms bounds the first)",
            "may pay" if found.pays else "do not pay", found.one_per_s, found.workers_per_s, found.one_gap_s,
            found.workers_gap_s,
        )  # fmt: skip

    def _follow(self, name: str) -> None:
        self._thread(partial(self._watch, name), f"diptych-{name}")

    def _watch(self, name: str) -> None:
        """Take in what a worker says until it dies, and again when it is back."""
        while not self._is_closing.is_set():
            try:
                batch = ray.get(self.actors[name].fetch.remote(self.hellos[name].incarnation), timeout=HUNG_S)
            except Exception as error:  # what a dead process raises has many names
                if self._is_closing.is_set() or name not in self.actors:
                    return
                self._do(partial(self.core.lost, name, _reason(error)))
                if self._is_back(name, is_hung=isinstance(error, GetTimeoutError)):
                    continue
                return
            if batch is not None:
                self.core.deliver(name, batch)
                self.llm.wake()

    def _is_back(self, name: str, *, is_hung: bool) -> bool:
        """Ray starts the actor again; what failed inside, or hangs, is killed for it first. False: it is not to come back."""
        before = self.hellos[name].incarnation
        if is_hung:
            ray.kill(self.actors[name], no_restart=False)
        while not self._is_closing.is_set() and name in self.actors:
            try:
                hello = ray.get(self.actors[name].hello.remote(), timeout=START_S)
                ahead_s = _clock_ahead_s(self.actors[name], self.clock)
            except ActorDiedError as error:
                self._begin_again(name, error)
                continue
            except Exception as error:
                logger.debug("worker not back name=%s: %s", name, _reason(error))
                self._is_closing.wait(POLL_S / 2)
                continue
            if hello.incarnation == before:  # its process lives: its engine has failed, or it did not answer for long
                ray.kill(self.actors[name], no_restart=False)
                self._is_closing.wait(POLL_S / 2)
                continue
            try:
                check_version(name, hello.version)  # its node may have got another meanwhile
            except LoadError as error:
                logger.error("worker stays out: %s; %s, and start the server again", error.message, error.hint)
                return False
            self.hellos[name] = hello
            self._introduce()
            self._do(partial(self._attach, name, ahead_s))
            return True
        return False

    def _begin_again(self, name: str, error: ActorDiedError) -> None:
        """Another actor in place of one that Ray starts no more, as its start failed: memory may be short for a moment."""
        logger.warning("worker did not start again name=%s why=%s", name, _reason(error))
        self._is_closing.wait(AGAIN_S)
        with self._scaling:
            if name in self.actors and not self._is_closing.is_set():
                ray.kill(self.actors[name])
                self.actors[name] = self._new_actor(name)

    def _do(self, action: Callable[[], object]) -> None:
        self.core.ask(action)
        self.llm.wake()

    def _await_done(self) -> None:
        """Until the engine's thread has done all that it was asked."""
        done = threading.Event()
        self._do(done.set)
        while not done.wait(POLL_S) and not self._is_closing.is_set():
            pass


def _node_id() -> str:
    """Of the node that this process is on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _knock(address: str) -> None:
    """OSError where nobody listens at host:port: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def check_there_is(needed: Mapping[str, int], resources: Mapping[str, float]) -> None:
    """LoadError where Ray would wait for a node that it does not have."""
    for name, number in needed.items():
        if resources.get(name, 0) < number:
            raise LoadError(
                f"the workers need {number} of Ray's resource {name}; its nodes have {resources.get(name, 0):g}",
                hint=f"""ray start --resources '{{"{name}": 1}}' gives a node some""" if name != "GPU" else None,
            )


def check_version(name: str, version: str) -> None:
    """LoadError where a worker runs another Diptych than the door: what they say to each other has changed, or may have."""
    if version != VERSION:
        raise LoadError(
            f"worker {name} runs Diptych {version}; this server is {VERSION}", hint="install one version on every node"
        )


def _clock_ahead_s(actor: Any, clock: Clock) -> float:
    """How far a worker's clock is ahead of ours, by the quickest of some calls; 0 where that cannot tell them apart."""
    best: tuple[float, float] | None = None
    for _ in range(5):
        begin_s = clock.now_s()
        hello = ray.get(actor.hello.remote(), timeout=HUNG_S)
        end_s = clock.now_s()
        found = (end_s - begin_s, hello.now_s - (begin_s + end_s) / 2)
        best = found if best is None else min(best, found)
    assert best is not None
    took_s, ahead_s = best
    return ahead_s if abs(ahead_s) > took_s else 0.0


def _said(error: BaseException) -> tuple[str, str | None]:
    """What went wrong in one line, as Ray's messages are pages; and the hint of an error of ours at the end of one."""
    cause = getattr(error, "cause", None) or error
    text, _, hint = str(cause).partition("\nhint: ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = lines[-1].removeprefix(f"{EngineError.__module__}.") if lines else ""
    return f"{type(cause).__name__}: {said}"[:300], hint.strip() or None


def _reason(error: BaseException) -> str:
    """What went wrong in one line."""
    return _said(error)[0]
