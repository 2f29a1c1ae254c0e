-- keys: tasks update
-- A trainer's answer and the end of its lease in one step: the answer is said once. ARGV[4]: the size
-- of the update that it names (0: none), whose expiry begins anew; ARGV[6]: the inbox, which trainers
-- may append to and not read, so it can't be declared.
local group, entry, answer, size, expire_ms, inbox = unpack(ARGV)
redis.call('EXISTS', inbox) -- as for undeclared keys: fails here where a cluster is moving it
local row = redis.pcall('XPENDING', key.tasks, group, entry, entry, 1)
if row.err or not row[1] then return 'over' end
if size ~= '0' and redis.call('HEXISTS', key.update, 'size') == 0 then return 'unwritten' end
redis.call('XADD', inbox, '*', 'm', answer)
redis.call('PEXPIRE', key.update, expire_ms)
redis.call('XACK', key.tasks, group, entry)
redis.call('XDEL', key.tasks, entry)
return 'said'
