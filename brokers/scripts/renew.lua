-- ARGV  2.. id, lease of each job held. Answers 1 or 0 for each: 0 is also how a holder learns of a cancel or a deadline.
local answers = {}
for i = 2, #ARGV, 2 do
  local id, lease = ARGV[i], ARGV[i + 1]
  local job = read(id)
  local mine = holds(job, lease)
  if mine and late(job) then
    finish(id, job, STATE.expired, 'deadline')
    mine = false
  end
  if mine then note_owner(id, job, lease) end
  answers[#answers + 1] = mine and 1 or 0
end
return answers
