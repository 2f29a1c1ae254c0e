-- keys: tasks update
-- Sends a trainer's answer and ends its lease in one step, so the answer is sent once. ARGV[4]: the
-- size of the update that it names (0: none), whose expiry is renewed; ARGV[6]: the inbox, which
-- can't be declared because trainers may append to it but not read it. rest, for error feedback in
-- the pool: the key of what this attempt's update left unsent, and the one that it gets if it is said.
local group, entry, answer, size, expire_ms, inbox = unpack(ARGV)
redis.call('EXISTS', inbox) -- as for undeclared keys: fails here while a cluster migrates it
local row = redis.pcall('XPENDING', key.tasks, group, entry, entry, '1')
local staged, kept = KEYS[first_rest], KEYS[first_rest + 1]
if row.err or not row[1] then
  if staged then redis.call('UNLINK', staged) end
  return 'over'
end
if size ~= '0' and redis.call('HEXISTS', key.update, 'size') == 0 then return 'unwritten' end
-- Before anything is written: it fails if the site's user has no right to it.
local unsent = staged and redis.call('EXISTS', staged) == 1
redis.call('XADD', inbox, '*', 'm', answer)
redis.call('PEXPIRE', key.update, expire_ms)
redis.call('XACK', key.tasks, group, entry)
redis.call('XDEL', key.tasks, entry)
if kept then
  redis.call('UNLINK', kept) -- this update had it added
  if unsent then redis.call('RENAME', staged, kept) end
end
return 'said'
