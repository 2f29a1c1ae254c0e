-- keys: run head queue counts
-- Adds an operator's control entry to the queue: the updater takes it in order with the updates.
-- ARGV: the devices and whether they are to be released; the entry.
local a = cmsgpack.unpack(ARGV[1])
local wrong, detail = why_not(a.devices)
if wrong then return {wrong, detail} end
guard()
if not a.release then
  local packed, n = redis.call('HGET', key.head, 'quarantines'), #a.devices
  for _, group in ipairs(packed and cmsgpack.unpack(packed).groups or {}) do
    n = n + #group.devices
  end
  if n > a.most then return {'full', tostring(n)} end
end
return {'queued', redis.call('XADD', key.queue, '*', 'm', ARGV[2])}
