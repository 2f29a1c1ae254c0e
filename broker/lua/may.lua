-- keys:
-- Whether this user may send commands (Redis 7): nothing is done. ARGV[1]: the commands.
local found = {}
for i, command in ipairs(cmsgpack.unpack(ARGV[1])) do
  found[i] = redis.acl_check_cmd(unpack(command)) and 1 or 0
end
return found
