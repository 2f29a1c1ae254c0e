-- keys: invites enrolled changed nonce
-- Makes the key that came with an invite that of the invite's device, once. The same invite with the
-- same key gets the same answer again: the reply may have been lost. ARGV: the device, the invite's
-- digest, the key, how long the nonce is kept in ms, and the name of the key that holds who is
-- revoked, which a gateway may only read. The nonce is noted for known invites only, so nobody
-- fills Redis without one. `changed` is for those who remember devices: a new one is none of them.
local device, digest, public, nonce_ms, revoked = unpack(ARGV)
if redis.call('HGET', revoked, device) then return 'revoked' end
local packed = redis.call('HGET', key.enrolled, device)
local was = packed and cmsgpack.unpack(packed) or {}
local again = was.invite == digest
if again and was.key ~= public then return 'used' end
if not again then
  local invite = redis.call('HGET', key.invites, device)
  if not invite then return 'unknown' end
  local expected, till_ms = string.match(invite, '^(%x+) (%d+)$')
  if expected ~= digest then return 'unknown' end
  if now_ms() >= tonumber(till_ms) then return 'expired' end
end
if not redis.call('SET', key.nonce, '', 'NX', 'PX', nonce_ms) then return 'replayed' end
if again then return 'again' end
redis.call('HSET', key.enrolled, device, cmsgpack.pack({key = public, invite = digest, at = now_ms()}))
redis.call('HDEL', key.invites, device)
if packed then redis.call('SET', key.changed, digest) end
return 'enrolled'
