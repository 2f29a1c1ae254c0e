-- keys: owners open
-- undeclared: run
-- Deletes copies of device state (rest) that will not be read: the site no longer serves the device
-- or the run is over, and no open task for the device was sent to that site. Returns how many.
local running = redis.call('HGET', key.run, 'state') == 'running'
local read -- the copies that open tasks need, filled on first use
local function is_read(copy)
  if not read then
    read = {}
    for _, trigger in ipairs(redis.call('HVALS', key.open)) do
      local about = cmsgpack.unpack(trigger)
      if about.site then read[about.site .. '/' .. about.device] = true end
    end
  end
  return read[copy]
end

local dropped = 0
for i = first_rest, #KEYS do
  local copy = string.sub(KEYS[i], #(prefix .. 'control:') + 1)
  local site, device = string.match(copy, '^(.*)/(.*)$')
  local owner = redis.call('HGET', key.owners, device or '')
  local is_served = running and site == (owner and site_of(owner) or 'pool')
  if not is_served and not is_read(copy) then dropped = dropped + redis.call('UNLINK', KEYS[i]) end
end
return dropped
