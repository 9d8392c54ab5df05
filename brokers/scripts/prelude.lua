-- Goes before every script. In front of it stand STATE and OVER, the state names from the table in pipeline/states.py, BATCH and
-- BATCH_OVER, those of batches, BOUNDS, which makes the table of a histogram's bounds from pipeline/metrics.py, and the settings
-- KEEP_MS and DEAD_MS, how long an ended job and one that was given up are kept, and MAX_ATTEMPTS.
--
-- KEYS  1 wake  2 dead  3 credits  4 deadlines  5 line  6 tenants  7 metrics  8 webhooks  9.. queue:0 .. queue:3, then job:<id> and
--       tokens:<id> of the jobs that the caller knows. A job that a script itself finds has keys in the same Cluster slot,
--       thanks to the braces in the prefix.
-- ARGV  1 prefix, then the script's own.
--
-- Redis does not undo half a script: each one first reads, then writes. Each is safe to repeat when its reply was lost.

local wake_key, dead_key, credits_key, deadlines_key, line_key, tenants_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local metrics_key, webhooks_key = KEYS[7], KEYS[8]
local queues = {[0] = KEYS[9], [1] = KEYS[10], [2] = KEYS[11], [3] = KEYS[12]}
local prefix = ARGV[1]
local GROUP = 'workers'

-- One moment for all that a script does, as Redis 7 has it by itself.
local moment
local function now()
  if not moment then
    local t = redis.call('TIME')
    moment = t[1] * 1000 + math.floor(t[2] / 1000)
  end
  return moment
end

local function job_key(id) return prefix .. 'job:' .. id end
local function log_key(id) return prefix .. 'tokens:' .. id end
local function tombstone_key(id) return prefix .. 'tombstone:' .. id end
local function worker_key(worker) return prefix .. 'worker:' .. worker end
local function file_key(id) return prefix .. 'file:' .. id end
local function batch_key(id) return prefix .. 'batch:' .. id end
local files_key, batches_key, open_batches_key = prefix .. 'files', prefix .. 'batches', prefix .. 'batches:open'

-- A lease id is <worker>#<random>, a credit <worker>/<nonce>.
local function worker_of(name) return string.match(name, '^(.-)[#/]') end

-- Counted in the step in which it happens, so that a call that is repeated counts once. pcall: whatever somebody has made of
-- the key, no job must suffer for it.
local function tally(field, by) redis.pcall('HINCRBY', metrics_key, field, by) end

-- Not negative: a clock that was set back must not make a sum fall.
local function observe(name, ms)
  ms = math.max(ms, 0)
  local bucket = 'inf'
  for _, bound in ipairs(BOUNDS()) do
    if ms <= bound * 1000 then bucket = bound break end
  end
  tally(name .. ':' .. bucket, 1)
  tally(name .. ':us', ms * 1000)
end

local function read(id)
  local h = redis.call('HMGET', job_key(id), 'status', 'lease', 'attempt', 'queue', 'entry', 'deadline', 'owner', 'turn', 'length')
  return {
    status = h[1], lease = h[2] or '', attempt = tonumber(h[3] or 0),
    queue = tonumber(h[4] or 0), entry = h[5], deadline = tonumber(h[6] or 0),
    owner = h[7] or '-', turn = tonumber(h[8] or 0), length = tonumber(h[9] or 0),
  }
end

-- Enough for `holds` and `late`: what is done for every token reads no more.
local function glance(id)
  local h = redis.call('HMGET', job_key(id), 'status', 'lease', 'deadline')
  return {status = h[1], lease = h[2] or '', deadline = tonumber(h[3] or 0)}
end

local function over(job) return OVER[job.status] end
local function late(job) return job.deadline > 0 and now() > job.deadline end
local function holds(job, lease) return lease ~= '' and job.lease == lease end

local function drop(queue, entry)
  if not (entry and queues[queue]) then return end -- of a record that somebody has spoilt
  redis.call('XACK', queues[queue], GROUP, entry)
  redis.call('XDEL', queues[queue], entry)
end

-- The pending list is only clock and index; the truth is job.lease. FORCE gives out an entry that nobody has read, so the line
-- decides who is next, and not the stream. Group and entry may be gone, by an operator's hand: they are made anew.
local function note_owner(id, job, lease)
  local function claim()
    return redis.pcall('XCLAIM', queues[job.queue], GROUP, worker_of(lease), 0, job.entry, 'FORCE', 'JUSTID')
  end
  local claimed = claim()
  if claimed.err then
    redis.call('XGROUP', 'CREATE', queues[job.queue], GROUP, '0', 'MKSTREAM')
    claimed = claim()
  end
  if not claimed[1] then
    job.entry = redis.call('XADD', queues[job.queue], '*', 'job', id)
    redis.call('HSET', job_key(id), 'entry', job.entry)
    claim()
  end
end

local function wake() redis.call('XADD', wake_key, 'MAXLEN', '1', '*', 'w', '1') end

-- before: the timeline that it is added to, if there is one.
local function with_line(before, event, detail)
  local line = now() .. ' ' .. event .. (detail and detail ~= '' and ' ' .. string.gsub(detail, '%s+', ' ') or '')
  return (before and before .. '\n' or '') .. line
end

local function note(id, event, detail)
  redis.call('HSET', job_key(id), 'timeline', with_line(redis.call('HGET', job_key(id), 'timeline'), event, detail))
end

-- The line of jobs that wait, by turns, after Golestani, "A self-clocked fair queueing scheme for
-- broadband applications" (INFOCOM 1994). Each tenant gets one turn a round, however many jobs it has: a job's turn is the one
-- after its tenant's last, but not before the round that is being served. A long prompt stands a turn further back for every
-- 256 tokens: so short ones pass it, and of them only so many. What was begun goes before all, low priority behind all; high
-- stands so many turns ahead of normal: it need not wait, and who marks everything as high still gets no more than that.
-- tenants has `round`: the one that is served, `<queue>:<tenant>`: its last turn, `waiting:<tenant>`: its jobs in line.
local AHEAD, TURN_TOKENS = {[0] = 1e9, [1] = 128, [2] = 0, [3] = -1e9}, 256

local function next_turn(queue, owner)
  local turns = redis.call('HMGET', tenants_key, 'round', queue .. ':' .. owner)
  return math.max(tonumber(turns[1] or 0), tonumber(turns[2] or 0)) + 1
end

local function line_up(id, job)
  local place = job.turn - (AHEAD[job.queue] or 0) + (job.queue > 0 and job.length / TURN_TOKENS or 0)
  redis.call('HSET', tenants_key, job.queue .. ':' .. job.owner, job.turn)
  local added = redis.call('ZADD', line_key, string.format('%.17g', place), id)
  redis.call('HINCRBY', tenants_key, 'waiting:' .. job.owner, added)
end

-- The entry's id says when the job began to wait.
local function step_out(id, job)
  local removed = redis.call('ZREM', line_key, id)
  if removed == 0 then return end
  local since = tonumber(string.match(job.entry or '', '^%d+'))
  if since then observe('queue', now() - since) end
  if redis.call('EXISTS', line_key) == 0 then redis.call('DEL', tenants_key) -- nobody waits: all are equal again
  elseif job.status then redis.call('HINCRBY', tenants_key, 'waiting:' .. job.owner, -1) end -- else the sweep counts anew
end

-- What tenants notes of each one's jobs in line, against the line itself. Answers tenant, noted and counted where they differ.
local function recount(mends)
  local counted, wrong = {}, {}
  for _, id in ipairs(redis.call('ZRANGE', line_key, 0, -1)) do
    local owner = read(id).owner
    counted[owner] = (counted[owner] or 0) + 1
  end
  local turns = redis.call('HGETALL', tenants_key)
  for i = 1, #turns, 2 do
    local owner = string.match(turns[i], '^waiting:(.*)')
    if owner then
      local noted, number = tonumber(turns[i + 1]), counted[owner] or 0
      if noted ~= number then wrong[#wrong + 1] = {owner, noted, number} end
      counted[owner] = nil
    end
  end
  for owner, number in pairs(counted) do wrong[#wrong + 1] = {owner, 0, number} end
  if mends then
    for _, it in ipairs(wrong) do redis.call('HSET', tenants_key, 'waiting:' .. it[1], it[3]) end
    if redis.call('EXISTS', line_key) == 0 then redis.call('DEL', tenants_key) end
  end
  return wrong
end

-- The log without its end, so that the next token can have its id. (XSETID would do, but not on every server.)
local function reopen(id)
  local entries = redis.call('XRANGE', log_key(id), '-', '+')
  redis.call('DEL', log_key(id))
  for i, entry in ipairs(entries) do
    if entry[2][1] ~= 'end' then redis.call('XADD', log_key(id), i .. '-0', unpack(entry[2])) end
  end
end

local function since(submitted) return now() - (tonumber(submitted) or now()) end

local function tally_end(submitted, status, reason)
  if status ~= STATE.finished then return tally('ended:' .. status, 1) end
  tally('ended:' .. status .. ':' .. reason, 1)
  observe('e2e', since(submitted))
end

-- A job with a webhook owes it from its end until it has arrived or was given up. As long, there is `webhook_tries` in its hash,
-- and its id is in webhooks:<target>, by the time of the next try. `webhooks` says when each target is next: however many jobs
-- wait for one that hangs, the next target is found in one step.
local function target_of(url) return string.lower(string.match(url, '^%a+://([^/?#]*)') or '') end
local function owed_key(target) return prefix .. 'webhooks:' .. target end

local function owe_webhook(id, url)
  if not url then return end
  local target = target_of(url)
  redis.call('HSET', job_key(id), 'webhook_tries', 0)
  redis.call('ZADD', owed_key(target), now(), id)
  redis.call('PEXPIRE', owed_key(target), math.max(KEEP_MS, DEAD_MS) + 60000) -- by then, all jobs in it are forgotten
  redis.call('ZADD', webhooks_key, 'LT', now(), target)
end

local function forget_webhook(id)
  local url = redis.call('HGET', job_key(id), 'webhook')
  if not url then return end
  redis.call('ZREM', owed_key(target_of(url)), id)
  redis.call('HDEL', job_key(id), 'webhook_tries')
end

local function close_webhook(id, said)
  forget_webhook(id)
  note(id, 'webhook', said)
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
  step_out(id, job)
  local known = redis.call('HMGET', job_key(id), 'timeline', 'submitted', 'webhook')
  if not over(job) then tally_end(known[2], status, reason) end -- else the audit writes an end anew
  if job.deadline > 0 then redis.call('ZREM', deadlines_key, id) end
  redis.call('HSET', job_key(id), 'status', status, 'lease', '', 'reason', reason, 'ended', now(),
    'timeline', with_line(known[1], status, reason))
  if not over(job) then owe_webhook(id, known[3]) end -- else the audit writes an end anew
  local at = now() + (kept_ms or KEEP_MS)
  redis.call('PEXPIREAT', log_key(id), at)
  redis.call('PEXPIREAT', job_key(id), at + 60000)
  redis.call('PUBLISH', prefix .. 'tombstones', id)
end

local function give_up(id, job, reason)
  redis.call('XADD', dead_key, 'MINID', '~', now() - DEAD_MS, '*', 'job', id, 'attempts', job.attempt, 'reason', reason)
  finish(id, job, STATE.failed, reason, DEAD_MS)
end

-- To the front: what was begun already is served first. cause: one word, to be counted; reason: for people.
local function enqueue(id, job, reason, attempt, cause)
  job.queue, job.turn = 0, next_turn(0, job.owner)
  local entry = redis.call('XADD', queues[0], '*', 'job', id)
  redis.call('HSET', job_key(id), 'status', STATE.queued, 'lease', '', 'queue', 0, 'turn', job.turn, 'entry', entry,
    'attempt', attempt)
  line_up(id, job)
  tally('requeues:' .. cause, 1)
  note(id, STATE.queued, reason)
  wake()
end

-- The holder is gone or gives the job back: another attempt, unless it is too late or there were too many.
-- cause: lease_ran_out, released, mended, or refunded, and then the attempt does not count.
local function requeue(id, job, reason, cause)
  redis.call('HSET', job_key(id), 'why:' .. job.attempt, reason)
  if cause == 'refunded' then job.attempt = job.attempt - 1 end
  if late(job) then finish(id, job, STATE.expired, 'deadline') return 'expired' end
  if job.attempt >= MAX_ATTEMPTS then give_up(id, job, reason) return 'dead' end
  drop(job.queue, job.entry)
  step_out(id, job)
  enqueue(id, job, reason, job.attempt, cause)
  return 'queued'
end

local function add_file(id, owner, purpose, filename, bytes, kept_ms)
  local at = now()
  redis.call('HSET', file_key(id), 'id', id, 'owner', owner, 'purpose', purpose, 'filename', filename, 'bytes', bytes,
    'created_at', math.floor(at / 1000), 'expires_at', math.floor((at + kept_ms) / 1000))
  redis.call('PEXPIREAT', file_key(id), at + kept_ms)
  redis.call('ZADD', files_key, at, id)
end
