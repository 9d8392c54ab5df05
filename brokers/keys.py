"""Every Redis key of kvrelay on one screen.

    key               type          lifetime           writers               what
    ----------------  ------------  -----------------  --------------------  ------------------------------------------
    queue:0..3        stream+group  for ever           submit release sweep  one entry {job} per unfinished job; 0 is for
                                    (entries: to end)  finish                jobs handed back, then high, normal, low
    wake              stream of 1   for ever           submit release        rung when a job or a credit is new
                                                       credits
    credits           sorted set    for ever           decode workers;       <worker>/<nonce>, score = busy places
                                    (members: to use)  lease takes
    deadlines         sorted set    for ever           submit, finish,       ids of unfinished jobs that have a deadline
                                    (members: to end)  sweep
    dead              stream        for ever           give_up               jobs given up: job, attempts, reason
    workers           set           for ever           registry              ids that may be alive
    worker:<id>       hash          3 heartbeats       its keeper            role, device, model, host, versions, figures
    job:<id>          hash          end + keep + 60 s  submit, all scripts   request, status, lease, attempt, timeline …
    tokens:<id>       stream        end + keep         append, finish        entry (i+1)-0: t token id, x text to show;
                                                                             the last one: end status, reason
    tombstone:<id>    string        keep               stop, settle          who, when, phase, ms: for people only
    tombstones        channel       –                  finish                ids of jobs that ended, as a bell

All under one prefix `kvr:{<model>}:`. A job's truth is `lease` in its hash: the pending list is only clock and index.
Prompts are kept as token ids in `job:<id>` (field request), answers in `tokens:<id>`; both go when they expire.
"""

from dataclasses import dataclass

from pipeline.job import QUEUES

GROUP = "workers"


@dataclass(frozen=True, slots=True)
class Keys:
    """Names under one prefix."""

    prefix: str

    @property
    def queues(self) -> list[str]:
        return [f"{self.prefix}queue:{index}" for index in range(QUEUES)]

    @property
    def wake(self) -> str:
        return self.prefix + "wake"

    @property
    def credits(self) -> str:
        return self.prefix + "credits"

    @property
    def deadlines(self) -> str:
        return self.prefix + "deadlines"

    @property
    def dead(self) -> str:
        return self.prefix + "dead"

    @property
    def workers(self) -> str:
        return self.prefix + "workers"

    @property
    def tombstones(self) -> str:
        return self.prefix + "tombstones"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}worker:{worker}"

    def job(self, job: str) -> str:
        return f"{self.prefix}job:{job}"

    def tokens(self, job: str) -> str:
        return f"{self.prefix}tokens:{job}"

    def tombstone(self, job: str) -> str:
        return f"{self.prefix}tombstone:{job}"
