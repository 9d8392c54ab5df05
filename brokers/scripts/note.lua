-- A line for the job's timeline, from its holder. ARGV  4 id  5 lease  6 event  7 detail. A record: nothing decides on it.
if not holds(read(ARGV[4]), ARGV[5]) then return 0 end
note(ARGV[4], ARGV[6], ARGV[7])
return 1
