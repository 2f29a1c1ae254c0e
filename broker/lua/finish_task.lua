-- keys: tasks uploads
-- A trainer's answer and the end of its lease in one step: the answer is said once.
local group, entry, answer = unpack(ARGV)
local row = redis.pcall('XPENDING', key.tasks, group, entry, entry, 1)
if row.err or not row[1] then return 0 end
redis.call('XADD', key.uploads, '*', 'm', answer)
redis.call('XACK', key.tasks, group, entry)
redis.call('XDEL', key.tasks, entry)
return 1
