-- Is what `tenants` notes of each one's jobs in line what is in line? In one step, for it changes with every job.
-- ARGV  2 '1': mend what is not. Answers tenant, what is noted and what is in line, in turn.
local found = {}
for _, wrong in ipairs(recount(ARGV[2] == '1')) do
  for _, part in ipairs(wrong) do found[#found + 1] = part end
end
return found
