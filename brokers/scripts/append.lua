-- ARGV  2.. per job: id, lease, index of the first token, number of tokens, then (token, text, logprobs or '') of each, then end
--          status or '', reason
-- Answers per job: the next index | lost:<status> | gap:<length of the log>
-- XADD's explicit id refuses repeats but not gaps: hence the check of the index.
local answers, i, appended = {}, 2, 0
while i <= #ARGV do
  local id, lease, start, count = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local first = i + 4
  local status, reason = ARGV[first + 3 * count], ARGV[first + 3 * count + 1]
  i = first + 3 * count + 2
  local job = glance(id)
  local answer
  if not holds(job, lease) then answer = 'lost:' .. (job.status or 'gone')
  elseif late(job) then
    finish(id, read(id), STATE.expired, 'deadline')
    answer = 'lost:' .. STATE.expired
  else
    local log = log_key(id)
    local length = redis.call('XLEN', log)
    if start > length then answer = 'gap:' .. length
    else
      for index = length, start + count - 1 do
        local at = first + 3 * (index - start)
        local place, token, text, logprobs = (index + 1) .. '-0', ARGV[at], ARGV[at + 1], ARGV[at + 2]
        if logprobs == '' then redis.call('XADD', log, place, 't', token, 'x', text)
        else redis.call('XADD', log, place, 't', token, 'x', text, 'p', logprobs) end
        appended = appended + 1
        if index == 0 then
          local known = redis.call('HMGET', job_key(id), 'timeline', 'submitted', 'length')
          redis.call('HSET', job_key(id), 'timeline', with_line(known[1], 'first_token'))
          tally('prompt_tokens', known[3] or 0)
          observe('ttft', since(known[2]))
        end
      end
      if status ~= '' then finish(id, read(id), status, reason) end
      answer = tostring(math.max(length, start + count))
    end
  end
  answers[#answers + 1] = answer
end
if appended > 0 then tally('generation_tokens', appended) end -- once a call: this is the path of every step
return answers
