-- A file is whole and on the disk: from now on it can be seen.
-- ARGV  2 id  3 owner  4 purpose  5 name that its owner gave it  6 bytes  7 milliseconds that it is kept
add_file(ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7]))
return 'ok'
