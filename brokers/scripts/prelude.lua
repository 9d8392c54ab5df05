-- Goes before every script. In front of it stand STATE and OVER, the state names from the table in pipeline/states.py, and the
-- settings KEEP_MS and DEAD_MS, how long an ended job and one that was given up are kept, and MAX_ATTEMPTS.
--
-- KEYS  1 wake  2 dead  3 credits  4 deadlines  5.. queue:0 .. queue:3, then job:<id> and tokens:<id> of the jobs that the caller knows.
--       A job that a script itself finds in a queue has keys in the same Cluster slot, thanks to the braces in the prefix.
-- ARGV  1 prefix, then the script's own.
--
-- Redis does not undo half a script: each one first reads, then writes. Each is safe to repeat when its reply was lost.

local wake_key, dead_key, credits_key, deadlines_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local queues = {[0] = KEYS[5], [1] = KEYS[6], [2] = KEYS[7], [3] = KEYS[8]}
local prefix = ARGV[1]
local GROUP = 'workers'

local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function job_key(id) return prefix .. 'job:' .. id end
local function log_key(id) return prefix .. 'tokens:' .. id end
local function tombstone_key(id) return prefix .. 'tombstone:' .. id end
local function worker_key(worker) return prefix .. 'worker:' .. worker end

-- A lease id is <worker>#<random>, a credit <worker>/<nonce>.
local function worker_of(name) return string.match(name, '^(.-)[#/]') end

local function read(id)
  local h = redis.call('HMGET', job_key(id), 'status', 'lease', 'attempt', 'queue', 'entry', 'deadline')
  return {
    status = h[1], lease = h[2] or '', attempt = tonumber(h[3] or 0),
    queue = tonumber(h[4] or 0), entry = h[5], deadline = tonumber(h[6] or 0),
  }
end

local function over(job) return OVER[job.status] end
local function late(job) return job.deadline > 0 and now() > job.deadline end
local function holds(job, lease) return lease ~= '' and job.lease == lease end

local function drop(queue, entry)
  if not (entry and queues[queue]) then return end -- of a record that somebody has spoilt
  redis.call('XACK', queues[queue], GROUP, entry)
  redis.call('XDEL', queues[queue], entry)
end

-- The pending list is only clock and index; the truth is job.lease. The group may be gone: then there is nothing to note.
local function note_owner(job, lease)
  redis.pcall('XCLAIM', queues[job.queue], GROUP, worker_of(lease), 0, job.entry, 'JUSTID')
end

local function wake() redis.call('XADD', wake_key, 'MAXLEN', '1', '*', 'w', '1') end

local function note(id, event, detail)
  local line = now() .. ' ' .. event .. (detail and detail ~= '' and ' ' .. string.gsub(detail, '%s+', ' ') or '')
  local before = redis.call('HGET', job_key(id), 'timeline')
  redis.call('HSET', job_key(id), 'timeline', (before and before .. '\n' or '') .. line)
end

-- The log without its end, so that the next token can have its id. (XSETID would do, but not on every server.)
local function reopen(id)
  local entries = redis.call('XRANGE', log_key(id), '-', '+')
  redis.call('DEL', log_key(id))
  for i, entry in ipairs(entries) do
    if entry[2][1] ~= 'end' then redis.call('XADD', log_key(id), i .. '-0', unpack(entry[2])) end
  end
end

-- The one way in which a job ends. Over <=> terminal entry <=> no queue entry <=> no lease.
local function finish(id, job, status, reason, kept_ms)
  local place = (redis.call('XLEN', log_key(id)) + 1) .. '-0'
  local added = redis.pcall('XADD', log_key(id), place, 'end', status, 'reason', reason)
  if type(added) == 'table' and added.err then -- somebody has torn a hole: nobody may read on over it, and the job must end
    redis.call('DEL', log_key(id))
    redis.call('XADD', log_key(id), '1-0', 'end', status, 'reason', reason)
  end
  drop(job.queue, job.entry)
  redis.call('ZREM', deadlines_key, id)
  redis.call('HSET', job_key(id), 'status', status, 'lease', '', 'reason', reason, 'ended', now())
  note(id, status, reason)
  local at = now() + (kept_ms or KEEP_MS)
  redis.call('PEXPIREAT', log_key(id), at)
  redis.call('PEXPIREAT', job_key(id), at + 60000)
  redis.call('PUBLISH', prefix .. 'tombstones', id)
end

local function give_up(id, job, reason)
  redis.call('XADD', dead_key, 'MINID', '~', now() - DEAD_MS, '*', 'job', id, 'attempts', job.attempt, 'reason', reason)
  finish(id, job, STATE.failed, reason, DEAD_MS)
end

-- To the front: what was begun already is served first.
local function enqueue(id, reason, attempt)
  local entry = redis.call('XADD', queues[0], '*', 'job', id)
  redis.call('HSET', job_key(id), 'status', STATE.queued, 'lease', '', 'queue', 0, 'entry', entry, 'attempt', attempt)
  note(id, STATE.queued, reason)
  wake()
end

-- The holder is gone or gives the job back: another attempt, unless it is too late or there were too many.
local function requeue(id, job, reason, refund)
  redis.call('HSET', job_key(id), 'why:' .. job.attempt, reason)
  if refund then job.attempt = job.attempt - 1 end
  if late(job) then finish(id, job, STATE.expired, 'deadline') return 'expired' end
  if job.attempt >= MAX_ATTEMPTS then give_up(id, job, reason) return 'dead' end
  drop(job.queue, job.entry)
  enqueue(id, reason, job.attempt)
  return 'queued'
end
