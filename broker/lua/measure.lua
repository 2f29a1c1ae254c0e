-- keys:
-- Of streams of tasks (rest): how many entries are under a lease that holds, and in which of them, counted
-- from 0, one ran out.
local group, lease_ms = unpack(ARGV)
local leased, lapsed = 0, {}
for i = first_rest, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[i], group)
  if pending.err then
    if not string.find(pending.err, 'NOGROUP') then return pending end -- no trainer was ever there
  elseif pending[1] > 0 then
    local over = #redis.call('XPENDING', KEYS[i], group, 'IDLE', lease_ms, '-', '+', 10000)
    leased = leased + pending[1] - over
    if over > 0 then lapsed[#lapsed + 1] = i - first_rest end
  end
end
return {leased, lapsed}
