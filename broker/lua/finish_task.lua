-- keys: tasks update
-- Sends a trainer's answer and ends its lease in one step, so the answer is sent once. ARGV[4]: the
-- size of the update that it names (0: none), whose expiry is renewed; ARGV[6]: the inbox, which
-- can't be declared because trainers may append to it but not read it. rest, for error feedback in
-- the pool and local values: pairs of this attempt's key, and the one that it gets if it is said.
local group, entry, answer, size, expire_ms, inbox = unpack(ARGV)
redis.call('EXISTS', inbox) -- as for undeclared keys: fails here while a cluster migrates it
local row = redis.pcall('XPENDING', key.tasks, group, entry, entry, '1')
if row.err or not row[1] then
  for i = first_rest, #KEYS, 2 do redis.call('UNLINK', KEYS[i]) end
  return 'over'
end
if size ~= '0' and redis.call('HEXISTS', key.update, 'size') == 0 then return 'unwritten' end
-- Before anything is written: it fails if the site's user has no right to it.
local staged = {}
for i = first_rest, #KEYS, 2 do staged[i] = redis.call('EXISTS', KEYS[i]) == 1 end
redis.call('XADD', inbox, '*', 'm', answer)
redis.call('PEXPIRE', key.update, expire_ms)
redis.call('XACK', key.tasks, group, entry)
redis.call('XDEL', key.tasks, entry)
for i = first_rest, #KEYS, 2 do
  redis.call('UNLINK', KEYS[i + 1]) -- error feedback: this update had it added
  if staged[i] then redis.call('RENAME', KEYS[i], KEYS[i + 1]) end
end
return 'said'
