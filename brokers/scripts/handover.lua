-- ARGV  2 id  3 lease of the prefill worker  4 lease of the decode worker. Answers ok and the request, or lost:<status>.
local id, from, to = ARGV[2], ARGV[3], ARGV[4]
local job = read(id)
local known = redis.call('HMGET', job_key(id), 'request', 'timeline')
if not holds(job, to) then
  if not holds(job, from) then return {'lost:' .. (job.status or 'gone')} end
  note_owner(id, job, to)
  redis.call('HSET', job_key(id), 'lease', to, 'status', STATE.decoding,
    'timeline', with_line(known[2], STATE.decoding, worker_of(to)))
end
return {'ok', known[1]}
