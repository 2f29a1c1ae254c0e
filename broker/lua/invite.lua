-- keys: run invites revoked
-- Invites devices to enrol at a gateway: all of them, or none. A new invite takes the place of one
-- that was not used. ARGV: the devices, the digests of their invites, and how long these hold in ms.
local a = cmsgpack.unpack(ARGV[1])
local wrong, detail = why_not(a.devices)
if wrong then return {wrong, detail} end
for _, device in ipairs(a.devices) do
  if redis.call('HGET', key.revoked, device) then return {'revoked', tostring(device)} end
end
local till_ms = now_ms() + a.holds_ms
for i, device in ipairs(a.devices) do
  redis.call('HSET', key.invites, device, string.format('%s %.0f', a.digests[i], till_ms))
end
return {'invited', string.format('%.0f', till_ms)}
