// AMX on a processor without it: the instructions trap as undefined, and a handler does what Intel's manual says they do (their
// arithmetic by the twin of amx_tiles.h). Checks of what is compiled for the hardware, its registers, addresses and configurations;
// three microseconds an instruction. Linux, x86-64.
#pragma once

namespace diptych {

// From now on, for every thread of the process. What a processor would refuse ends the process with a message.
void emulate_amx();

}  // namespace diptych
