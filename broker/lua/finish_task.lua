-- keys: tasks uploads update
-- A trainer's answer and the end of its lease in one step: the answer is said once. A model of one
-- chunk comes along (else ARGV[4] is '').
local group, entry, answer, chunk, expire_ms = unpack(ARGV)
local row = redis.pcall('XPENDING', key.tasks, group, entry, entry, 1)
if row.err or not row[1] then return 0 end
if chunk ~= '' then
  redis.call('HSET', key.update, 'size', #chunk, '0', chunk)
  redis.call('PEXPIRE', key.update, expire_ms)
end
redis.call('XADD', key.uploads, '*', 'm', answer)
redis.call('XACK', key.tasks, group, entry)
redis.call('XDEL', key.tasks, entry)
return 1
