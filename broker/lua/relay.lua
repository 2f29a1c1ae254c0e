-- keys: stream events counts rates
-- What a site tells observers goes on to them, within its rate. ARGV: group, entry, site, event ('': it
-- is of no use), most a second, under what it is counted if it does not go on.
local group, entry, site, event, most, why = unpack(ARGV)
guard()
if not take(key.stream, group, entry) then return 'repeated' end
if event == '' or not within('event ' .. site, tonumber(most)) then
  count('stray:' .. why)
  return 'dropped'
end
tell(cmsgpack.unpack(event))
return 'told'
