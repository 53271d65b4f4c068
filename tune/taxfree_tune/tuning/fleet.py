"""Several nodes of the same hardware that tune one list: a storage of Optuna in PostgreSQL.

A node asks for a batch under a lock of the study, which the server holds: it sees all trials that
are claimed, so that no candidate is measured twice. Claims are running trials with a heartbeat.
Where a node dies, its heartbeats end, and Optuna puts its candidates back into the queue. The last
measurement of a problem, side by side, is claimed in the same way; its record is left for the other
nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.trial import TrialState

from taxfree.errors import TaxfreeError, UsageError

LEASE_S = 60  # without a heartbeat, after which a node counts as dead
_BEATS = 6  # of a lease
_SCHEMES = ("postgresql://", "postgres://")
_RECORD = "record"
#: how soon the server notices that a node has gone, and releases its lock
_KEEP_ALIVE = "-c tcp_keepalives_idle=15 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"


@dataclass(frozen=True)
class Finals:
    """The last measurement of a problem.

    Args:
        record: as JSON, where a node has measured it; else this node is to.
        trial: this node's claim.
    """

    record: dict[str, Any] | None
    trial: optuna.Trial | None


class Fleet(AbstractContextManager["Fleet"]):
    """The shared storage, and this node's claims in it.

    Args:
        url: `postgresql://user:password@host/database`; its tables are made where they are missing.

    Raises:
        UsageError: the URL is not one of PostgreSQL.
        TaxfreeError: the driver is missing, or the server does not answer.
    """

    def __init__(self, url: str) -> None:
        scheme = next((scheme for scheme in _SCHEMES if url.startswith(scheme)), None)
        if scheme is None:
            raise UsageError("--storage is no URL of PostgreSQL", "postgresql://host/database")
        if importlib.util.find_spec("psycopg") is None:
            raise TaxfreeError(
                "--storage needs psycopg, which is not installed", "pip install 'taxfree[fleet]'"
            )
        self._held: set[int] = set()
        self._ended = threading.Event()
        with _answering(), _quiet():
            self.storage = RDBStorage(
                "postgresql+psycopg://" + url.removeprefix(scheme),
                engine_kwargs={"connect_args": {"options": _KEEP_ALIVE}},
                heartbeat_interval=max(1, LEASE_S // _BEATS),
                grace_period=LEASE_S,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
            )
        self._beating = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._beating.start()

    def study(self, name: str, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
        """The study of a name of any length, which is made where it is missing."""
        with _answering():
            return optuna.create_study(
                storage=self.storage,
                study_name=hashlib.sha256(name.encode()).hexdigest(),
                load_if_exists=True,
                direction="minimize",
                sampler=sampler,
            )

    @contextlib.contextmanager
    def alone(self, study: optuna.Study) -> Iterator[None]:
        """Keep other nodes from claiming of a study; claims of dead nodes are released first."""
        lock = int.from_bytes(bytes.fromhex(study.study_name)[:8], signed=True)
        with _answering(), self.storage.engine.connect() as connection:
            # The server releases it where this connection ends, however it ends.
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:lock)"), {"lock": lock})
            try:
                with _quiet():
                    fail_stale_trials(study)
                yield
            finally:
                connection.execute(
                    sqlalchemy.text("SELECT pg_advisory_unlock(:lock)"), {"lock": lock}
                )

    def trials(
        self, study: optuna.Study, states: Sequence[TrialState]
    ) -> list[optuna.trial.FrozenTrial]:
        """The trials of a study in these states."""
        with _answering():
            return study.get_trials(deepcopy=False, states=states)

    def ask(self, study: optuna.Study) -> optuna.Trial:
        """Claim the next trial of a study, until it is told or let go."""
        with _quiet():
            trial = study.ask()
        self.storage.record_heartbeat(trial._trial_id)
        self._held.add(trial._trial_id)
        return trial

    def tell(
        self, study: optuna.Study, trial: optuna.Trial, value: float | None, state: Any
    ) -> None:
        """End a claim."""
        with _answering():
            study.tell(trial, value, state=state)
        self._held.discard(trial._trial_id)

    def finals(self, name: str) -> Finals | None:
        """The last measurement of a problem; None while another node is at it."""
        study = self.study(f"{name} finals")
        with self.alone(study):
            trials = study.get_trials(deepcopy=False)
            done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
            if done:
                return Finals(json.loads(done[-1].user_attrs[_RECORD]), None)
            if any(trial.state == TrialState.RUNNING for trial in trials):
                return None
            return Finals(None, self.ask(study))

    def decided(self, name: str, trial: optuna.Trial, record: dict[str, Any] | None) -> None:
        """Leave the record of a last measurement to the other nodes; None lets it go."""
        study = self.study(f"{name} finals")
        if record is None:
            self.tell(study, trial, None, TrialState.FAIL)
            return
        with _answering():
            trial.set_user_attr(_RECORD, json.dumps(record))
        self.tell(study, trial, 0.0, TrialState.COMPLETE)

    def _beat(self) -> None:
        while not self._ended.wait(LEASE_S / _BEATS):
            for trial in tuple(self._held):
                # A server that does not answer is reported by what this node does next.
                with contextlib.suppress(Exception):
                    self.storage.record_heartbeat(trial)
        self.storage.remove_session()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._beating.join()
        self.storage.remove_session()
        self.storage.engine.dispose()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna, for which heartbeats are experimental, and of its own loop only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Report a server that does not answer; its URL, which may hold a password, is not shown.

    Raises:
        TaxfreeError: it does not.
    """
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = str(getattr(error, "orig", None) or error.__cause__ or error)
        raise TaxfreeError(
            f"the storage of --storage does not answer: {cause.strip().splitlines()[0]}",
            "finished trials are kept; rerun to continue",
        ) from error
