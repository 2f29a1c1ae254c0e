-- keys:
-- Counts the entries under a live lease in task streams (rest), and finds the streams, numbered
-- from 0, with an expired lease.
local group, lease_ms = unpack(ARGV)
local leased, lapsed = 0, {}
for i = first_rest, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[i], group)
  if pending.err then
    if not string.find(pending.err, 'NOGROUP') then return pending end -- no trainer has read it yet
  elseif pending[1] > 0 then
    local over = #redis.call('XPENDING', KEYS[i], group, 'IDLE', lease_ms, '-', '+', 10000)
    leased = leased + pending[1] - over
    if over > 0 then lapsed[#lapsed + 1] = i - first_rest end
  end
end
return {leased, lapsed}
