-- keys: run invites revoked changed tokens
-- Turns devices away from a gateway, or admits them again. An invite of a device that is turned away
-- is withdrawn. Works out of memory as well. ARGV: the devices, whether they are admitted, and a text
-- that `changed` never was before. Returns a verdict and a detail: the devices that were not so
-- already.
local a = cmsgpack.unpack(ARGV[1])
local wrong, detail = why_not(a.devices)
if wrong and wrong ~= 'finished' then return {wrong, detail} end
room()
local now, changed = now_ms(), {}
for _, device in ipairs(a.devices) do
  local done
  if a.admit then
    done = redis.call('HDEL', key.revoked, device)
  else
    done = redis.call('HSETNX', key.revoked, device, string.format('%.0f', now))
    redis.call('HDEL', key.invites, device)
  end
  if done == 1 then changed[#changed + 1] = tostring(device) end
end
redis.call('SET', key.changed, a.stamp)
return {'set', table.concat(changed, ' ')}
