-- keys: stream events counts rates
-- Relays a site's event to observers, within its rate. ARGV: group, entry, site, event ('' if
-- invalid), the most per second, the reason under which it is counted if dropped.
local group, entry, site, event, most, why = unpack(ARGV)
guard()
if not take(key.stream, group, entry) then return 'repeated' end
if event == '' or not within('event ' .. site, tonumber(most)) then
  count('stray:' .. why)
  return 'dropped'
end
tell(cmsgpack.unpack(event))
return 'told'
