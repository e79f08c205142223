"""The engine thread: the only place that touches the model.

Theory of operation. HTTP threads parse, render and tokenise, then submit a ``Job``; one thread routes jobs, starts them in
order of arrival and advances all that run pass by pass (:mod:`scheduler`). What goes between the threads is the list of
arrivals, the events of each job, and what :meth:`Engine.snapshot` reads, published after every change. No lock is held while
computing.
"""

import logging
import sys
import threading
import time
from collections import Counter, deque

from . import banks
from .jobs import QueueFull, Stopping
from .keeper import Keeper
from .lanes import Environment
from .scheduler import Schedule, Scheduler
from .trace import log_request

log = logging.getLogger("ds4server")
RECENT = 32
SERIAL_ONLY = Environment()
SAVING = 60.0  # seconds that what is resident may take to reach the disk at the end


class Engine:
    """Owns ``model`` and the banks of ``reuser``, and runs jobs on them on its own thread.

    max_queue: jobs that may wait; max_bytes: of the bodies of all jobs that have not ended; max_age: seconds that a job may
    wait; each None for no bound. keeper: the :class:`Keeper` of the disk store, if there is one; ended: called with every job
    that has ended, on the engine's thread. The others are :class:`Scheduler`'s.
    """

    def __init__(self, model, reuser, max_queue=64, *, env=SERIAL_ONLY, schedule=None, keeper=None, memory=None, grouped=False,
                 coalesce_ms=0, max_bytes=None, max_age=None, drafts=None, ended=lambda job: None):  # fmt: skip
        self._reuser, self._ended = reuser, ended
        self._keeper = keeper or Keeper(None, reuser, lambda tokens: None)
        bounds = (max_queue, max_bytes, max_age)
        self._max_queue, self._max_bytes, self._max_age = (sys.maxsize if bound is None else bound for bound in bounds)
        self._scheduler = Scheduler(
            model, reuser, self._keeper, self._settle, env, schedule or Schedule(model.chunk, model.chunk), memory, grouped,
            coalesce_ms, stopped=self._late, arriving=lambda: bool(self._arrivals), drafts=drafts,
        )  # fmt: skip
        self._changed = threading.Condition()
        self._arrivals = deque()
        self._deadline = None
        self._places = env.width
        # Published under the lock of ``_changed``; what HTTP threads count is theirs alone.
        self._submitted = Counter(dict.fromkeys(("started", "shed.queue_full", "shed.shutdown"), 0))
        self._waiting = self._running = self._nbytes = 0
        self._banks, self._recent = banks.describe(reuser.banks, reuser.policy), deque(maxlen=RECENT)
        self._thread = threading.Thread(target=self._run, name="ds4-engine", daemon=True)

    def start(self):
        self._thread.start()

    # What HTTP threads call

    def check(self, nbytes=0, crowded=False):
        """QueueFull or Stopping where ``submit`` would refuse a job with a body of so many bytes now; for before it is read.
        crowded: whether there are more clients than may be."""
        with self._changed:
            self._check(nbytes)
            if crowded:
                self._submitted["shed.queue_full"] += 1
                raise QueueFull

    def submit(self, *jobs):
        """Queue the jobs of one request, all or none. QueueFull when they would wait behind too many others or their body is
        too much beside theirs, Stopping when the server is going down."""
        with self._changed:
            self._check(sum(job.nbytes for job in jobs))
            self._submitted["started"] += len(jobs)
            self._submitted.update(f"think.{job.think}" for job in jobs)
            self._nbytes += sum(job.nbytes for job in jobs)
            self._arrivals += jobs
            self._changed.notify()

    def _check(self, nbytes):
        if self.stopping:
            self._submitted["shed.shutdown"] += 1
            raise Stopping
        waiting = self._waiting + len(self._arrivals)
        free = max(0, self._places - self._running)
        if waiting >= self._max_queue + free or self._nbytes + nbytes > self._max_bytes:
            self._submitted["shed.queue_full"] += 1
            raise QueueFull

    def stop(self, grace=5.0):
        """Refuse new jobs, give the running ones ``grace`` seconds, write what is resident to disk, end the thread."""
        with self._changed:
            self._deadline = time.monotonic() + grace
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(grace + SAVING)

    @property
    def stopping(self):
        return self._deadline is not None

    @property
    def counts(self):
        """Every counter there is (``scheduler.COUNTERS``), from the start of the process."""
        return self.snapshot()[0]

    @property
    def last_request(self):
        """What became of the last job that ended (``Job.summary``), or None."""
        return self.snapshot()[3]

    def snapshot(self):
        """(counts, queue depth, jobs that run, last request) at one moment; never waits for a computation."""
        with self._changed:
            counts = Counter(self._scheduler.counts)
            for name, n in self._submitted.items():
                counts[name] += n
            waiting = self._waiting + len(self._arrivals)
            return counts, waiting, self._running, self._recent[0] if self._recent else None

    def recent(self):
        """``Job.summary`` of the last jobs that ended, newest first."""
        with self._changed:
            return list(self._recent)

    def banks(self):
        """The banks as they were when a job last began or ended: ``banks.describe``."""
        with self._changed:
            return self._banks

    @property
    def draft_cost(self):
        """Steps of the model that a draft costs, as measured; None where that is not done."""
        drafts = self._scheduler.drafts
        return None if drafts is None or drafts.cost is None else drafts.cost.per_draft

    @property
    def body_bytes(self):
        """Bytes of the bodies of all jobs that have not ended."""
        return self._nbytes

    @property
    def store(self):
        """The disk store (``kvstore.Store``), or None."""
        return self._keeper.store

    # The thread

    def _run(self):
        scheduler = self._scheduler
        look = None  # milliseconds that the waiting jobs may be left alone, None for none
        while True:
            with self._changed:
                if not (self._arrivals or scheduler.rows or self.stopping) and (look or not scheduler.waiting):
                    self._changed.wait(look / 1000 if scheduler.waiting else None)
                for job in self._arrivals:
                    scheduler.route(job)
                    scheduler.waiting.append(job)
                self._arrivals.clear()
                self._waiting = len(scheduler.waiting)
            if self.stopping:
                scheduler.refuse()
                if not scheduler.rows:
                    break
            scheduler.sweep(time.monotonic() - self._max_age)
            before = list(scheduler.rows)
            look = scheduler.refill()
            if scheduler.rows != before:
                self._publish()
            if scheduler.rows:
                scheduler.turn()
                look = None
        self._keeper.close()

    def _late(self):
        return self._deadline is not None and time.monotonic() > self._deadline

    def _settle(self, job, event):
        """A job has ended: publish, then tell its reader."""
        with self._changed:
            self._recent.appendleft(job.summary())
            self._nbytes -= job.nbytes
        self._publish()
        try:
            self._ended(job)
        except Exception:
            log.exception("request %s was not recorded", job.request_id)
        log_request(job)
        job.tell(event)

    def _publish(self):
        described = banks.describe(self._reuser.banks, self._reuser.policy)
        with self._changed:
            self._waiting, self._running = len(self._scheduler.waiting), len(self._scheduler.rows)
            self._banks = described
