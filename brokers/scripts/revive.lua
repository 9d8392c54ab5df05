-- A job that was given up gets its attempts anew, and goes on after the tokens that it has. By a person.
-- ARGV  2 id  3 its entry among the dead. Answers ok | gone (its record has expired) | over:<status> (it is not dead).
local id, entry = ARGV[2], ARGV[3]
local job = read(id)
if not job.status then return 'gone' end
if job.status ~= STATE.failed then return 'over:' .. job.status end
local ended = redis.call('XREVRANGE', log_key(id), '+', '-', 'COUNT', '1')[1]
if not ended or ended[1] ~= redis.call('XLEN', log_key(id)) .. '-0' then return 'gone' end
reopen(id)
for _, field in ipairs(redis.call('HKEYS', job_key(id))) do
  if string.find(field, '^why:') then redis.call('HDEL', job_key(id), field) end
end
redis.call('HDEL', job_key(id), 'reason', 'ended')
forget_webhook(id) -- of an end that was none; the next one has its own
redis.call('PERSIST', job_key(id))
redis.call('PERSIST', log_key(id))
if job.deadline > 0 then
  job.deadline = now() + job.deadline - redis.call('HGET', job_key(id), 'submitted')
  redis.call('HSET', job_key(id), 'deadline', job.deadline, 'submitted', now())
  redis.call('ZADD', deadlines_key, job.deadline, id)
end
redis.call('XDEL', dead_key, entry)
enqueue(id, job, 'requeued by hand', 0, 'by_hand')
return 'ok'
