#include "amx_emulation.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#define DIPTYCH_AMX_TWIN 1
#include "sets/amx_tiles.h"

namespace diptych {
namespace {

struct State {
  bool is_configured = false;
  TileConfig config;
  alignas(64) uint8_t data[kTileRegisters][kTileRows][kTileRowBytes];
};
thread_local State state;

void require(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "amx emulation: %s\n", what);
  std::_Exit(3);
}

// The instructions used here have the VEX prefix of three bytes, map 0F38 and no immediate.
struct Instruction {
  int prefix, opcode, mode, reg, rm, vvvv;  // prefix: 0 none, 1 66, 2 F3, 3 F2
  uint64_t address = 0, stride = 0;
  int length = 5;
};

uint64_t read_register(const ucontext_t& context, int number) {
  static constexpr int kPlaces[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                      REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<uint64_t>(context.uc_mcontext.gregs[kPlaces[number]]);
}

// ModRM's memory operand; `at` is what follows ModRM.
void decode_memory(Instruction& out, const uint8_t* at, const ucontext_t& context, int x, int b) {
  int base = out.rm;
  if (out.rm == 4) {
    const uint8_t sib = *at++;
    out.length += 1;
    const int index = (sib >> 3 & 7) + 8 * x;
    base = sib & 7;
    if (index != 4) out.stride = read_register(context, index) << (sib >> 6);
  }
  require(!(out.mode == 0 && base == 5), "an address without a base register");
  out.address = read_register(context, base + 8 * b);
  if (out.mode == 1) out.address += static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(*at))), out.length += 1;
  if (out.mode == 2) {
    int32_t offset;
    std::memcpy(&offset, at, 4);
    out.address += static_cast<uint64_t>(static_cast<int64_t>(offset)), out.length += 4;
  }
}

Instruction decode(const uint8_t* code, const ucontext_t& context) {
  require(code[0] == 0xc4 && (code[1] & 31) == 2, "an undefined instruction that is not of AMX");
  require((code[2] & 0x84) == 0, "VEX.W or VEX.L is set");
  Instruction out{code[2] & 3, code[3], code[4] >> 6, code[4] >> 3 & 7, code[4] & 7, ~(code[2] >> 3) & 15};
  if (out.mode != 3) decode_memory(out, code + 5, context, ~code[1] >> 6 & 1, ~code[1] >> 5 & 1);
  return out;
}

void configure(const Instruction& instruction) {
  std::memcpy(&state.config, reinterpret_cast<const void*>(instruction.address), sizeof state.config);
  const TileConfig& config = state.config;
  require(config.palette == 1 && config.start_row == 0, "palette or start row");
  for (uint8_t byte : config.reserved) require(byte == 0, "reserved bytes of the configuration");
  for (int tile = 0; tile < 16; ++tile) {
    require(config.rows[tile] <= kTileRows && config.row_bytes[tile] <= kTileRowBytes, "a tile is too large");
    require((config.rows[tile] == 0) == (config.row_bytes[tile] == 0), "a tile has rows or bytes alone");
    require(tile < kTileRegisters || config.rows[tile] == 0, "there is no such tile");
  }
  std::memset(state.data, 0, sizeof state.data);
  state.is_configured = true;
}

void require_tile(int tile) { require(state.is_configured && state.config.rows[tile] != 0, "a tile that is not configured"); }

void move(const Instruction& instruction, bool is_load) {
  require_tile(instruction.reg);
  require(instruction.mode != 3 && instruction.rm == 4, "a tile is loaded and stored with base and stride");
  auto& tile = state.data[instruction.reg];
  if (is_load) std::memset(tile, 0, sizeof tile);
  for (uint64_t row = 0; row < state.config.rows[instruction.reg]; ++row) {
    void* memory = reinterpret_cast<void*>(instruction.address + row * instruction.stride);
    const size_t bytes = state.config.row_bytes[instruction.reg];
    is_load ? std::memcpy(tile[row], memory, bytes) : std::memcpy(memory, tile[row], bytes);
  }
}

void multiply(const Instruction& instruction) {
  const int c = instruction.reg, a = instruction.rm, b = instruction.vvvv;
  require(b < kTileRegisters, "there is no such tile");
  for (int tile : {a, b, c}) require_tile(tile);
  require(a != b && b != c && a != c, "a product's tiles must differ");
  const TileConfig& config = state.config;
  require(config.rows[a] == config.rows[c] && config.row_bytes[b] == config.row_bytes[c] && config.row_bytes[a] == 4 * config.rows[b],
          "a product's tiles do not fit");
  TileFile& twin = tile_file();
  const int tiles[3] = {c, a, b};
  for (int i = 0; i < 3; ++i) {
    twin.config.rows[i] = config.rows[tiles[i]], twin.config.row_bytes[i] = config.row_bytes[tiles[i]];
    std::memcpy(twin.data[i], state.data[tiles[i]], kTileBytes);
  }
  instruction.opcode == 0x5c ? dot_bf16<0, 1, 2>() : instruction.prefix == 2 ? dot_int8<0, 1, 2>() : dot_signed<0, 1, 2>();
  std::memcpy(state.data[c], twin.data[0], kTileBytes);
}

void run(const Instruction& instruction) {
  const int prefix = instruction.prefix;
  const bool is_memory = instruction.mode != 3;
  switch (instruction.opcode) {
    case 0x49:
      if (prefix == 0 && is_memory && instruction.reg == 0) return configure(instruction);
      if (prefix == 0 && !is_memory && instruction.reg == 0 && instruction.rm == 0) return static_cast<void>(state.is_configured = false);
      if (prefix == 3 && !is_memory && instruction.rm == 0) {
        require_tile(instruction.reg);
        return static_cast<void>(std::memset(state.data[instruction.reg], 0, kTileBytes));
      }
      break;
    case 0x4b:
      if (prefix != 0) return move(instruction, prefix != 2);  // with 66: TILELOADDT1
      break;
    case 0x5c:  // TDPBF16PS
      if (prefix == 2 && !is_memory) return multiply(instruction);
      break;
    case 0x5e:  // with F3: TDPBSUD, with F2: TDPBSSD
      if (prefix >= 2 && !is_memory) return multiply(instruction);
      break;
  }
  require(false, "an instruction of AMX that is not known here");
}

void handle(int, siginfo_t*, void* pointer) {
  auto& context = *static_cast<ucontext_t*>(pointer);
  auto& place = context.uc_mcontext.gregs[REG_RIP];
  const Instruction instruction = decode(reinterpret_cast<const uint8_t*>(place), context);
  run(instruction);
  place += instruction.length;
}

}  // namespace

void emulate_amx() {
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace diptych
