"""Every Redis key of kvrelay on one screen.

    key               type          lifetime           writers               what
    ----------------  ------------  -----------------  --------------------  ------------------------------------------
    queue:0..3        stream+group  for ever           submit release sweep  one entry {job} per unfinished job; 0 is for
                                    (entries: to end)  finish                jobs handed back, then high, normal, low
    line              sorted set    for ever           submit release sweep  ids of jobs that wait; lowest score: the next one
                                    (members: to lease) lease finish
    tenants           hash          while some wait    the same              turns of each tenant, and its jobs in line
    wake              stream of 1   for ever           submit release offer  rung when a job is new, or a credit for one
    credits           sorted set    for ever           offer withdraw lease  <worker>/<nonce>, score: places in use before
                                    (members: to use)  sweep
    deadlines         sorted set    for ever           submit, finish,       ids of unfinished jobs that have a deadline
                                    (members: to end)  sweep
    dead              stream        for ever           give_up               jobs given up: job, attempts, reason
    metrics           hash          for ever           the scripts; report   what was counted, see pipeline/metrics.py
    webhooks          sorted set    for ever           finish deliver        targets (host:port), score: their next try, ms
                                    (members: to try)
    webhooks:<target> sorted set    last end + dead    finish deliver        ids of jobs that owe one, score: their next try;
                                    + 60 s             delivered revive      URL and number of tries are in job:<id>
    workers           set           for ever           registry              ids that may be alive
    worker:<id>       hash          3 heartbeats       its keeper; report    role, device, model, host, versions, figures
    job:<id>          hash          end + keep + 60 s  submit, all scripts   request, status, lease, attempt, timeline …
    tokens:<id>       stream        end + keep         append, finish        entry (i+1)-0: t token id, x text to show,
                                                                             p logprobs if the job asked for them; the
                                                                             last one: end status, reason
    tombstone:<id>    string        keep               stop, settle          who, when, phase, ms: for people only
    files             sorted set    for ever           file_add batch_end    ids of files, by when they were made
                                    (members: lazily)
    file:<id>         hash          until its expiry   the same, batch_add   owner, purpose, name, bytes; the bytes lie in
                                                                             KVR_FILES
    batches           sorted set    for ever           batch_add             ids of batches, by when they were made
                                    (members: lazily)
    batches:open      sorted set    for ever           batch_add batch_end   <owner>/<id> of those that are not over
                                    (members: to end)
    batch:<id>        hash          end + file seconds batch_*               request, status, lease, progress, results
    keys              hash          for ever           grant, admit, revoke  SHA-256 of an API key's secret → its record
    bucket:<key id>   hash          a minute's rest    admit                 requests that a key has left, and when
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
    def line(self) -> str:
        return self.prefix + "line"

    @property
    def tenants(self) -> str:
        return self.prefix + "tenants"

    @property
    def api_keys(self) -> str:
        return self.prefix + "keys"

    def bucket(self, key: str) -> str:
        return f"{self.prefix}bucket:{key}"

    @property
    def dead(self) -> str:
        return self.prefix + "dead"

    @property
    def metrics(self) -> str:
        return self.prefix + "metrics"

    @property
    def webhooks(self) -> str:
        return self.prefix + "webhooks"

    def owed(self, target: str) -> str:
        return f"{self.prefix}webhooks:{target}"

    @property
    def workers(self) -> str:
        return self.prefix + "workers"

    @property
    def files(self) -> str:
        return self.prefix + "files"

    @property
    def batches(self) -> str:
        return self.prefix + "batches"

    @property
    def open_batches(self) -> str:
        return self.prefix + "batches:open"

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

    def file(self, file: str) -> str:
        return f"{self.prefix}file:{file}"

    def batch(self, batch: str) -> str:
        return f"{self.prefix}batch:{batch}"
