// Bindings of weights that somebody else quantised: the grids of their groups by name, and their codes as a file has them.
#include <nanobind/nanobind.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "module/module.h"
#include "program/program.h"

namespace diptych {

Source source_of(const AnyArray& array) {
  const nb::dlpack::dtype dtype = array.dtype();
  const bool is_float = dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && dtype.lanes == 1;
  const bool is_bfloat = dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.lanes == 1;
  if (is_bfloat && dtype.bits == 16) return Source::bf16;
  if (is_float && dtype.bits == 16) return Source::f16;
  if (is_float && dtype.bits == 32) return Source::f32;
  throw std::invalid_argument("a weight must be float32, float16 or bfloat16");
}

Grid grid_of(const std::string& format, const std::string& scale, const std::string& grid) {
  const auto [offset, levels] = named<std::pair<Offset, Levels>>("grid", grid, {
      {"signed", {Offset::none, Levels::centred}},
      {"zeros", {Offset::zeros, Levels::plain}},
      {"minima", {Offset::minima, format == "group8" ? Levels::centred : Levels::plain}},
      {"minima16", {Offset::minima, format == "group8" ? Levels::centred : Levels::plain}},
      {"iq4_nl", {Offset::none, Levels::iq4_nl}},
      {"e2m1", {Offset::none, Levels::e2m1}},
      {"iq2", {Offset::none, Levels::iq2}},
      {"iq3_xxs", {Offset::none, Levels::iq3_xxs}},
      {"iq3_s", {Offset::none, Levels::iq3_s}},
      {"iq1", {Offset::none, Levels::iq1}},
      {"nf4", {Offset::none, Levels::nf4}},
      {"fp4", {Offset::none, Levels::fp4}},
  });
  const bool is_of_threes = levels == Levels::iq2 || levels == Levels::iq1;
  const bool is_of_fours = offset == Offset::zeros || (levels > Levels::plain && !is_of_threes);
  if ((is_of_threes && format != "group3") || (is_of_fours && format != "group4")) throw std::invalid_argument(format + " has no grid " + grid);
  const bool is_e4m3 = scale == "e4m3", is_e8m0 = scale == "e8m0", is_nested = scale == "s8" || is_e4m3, has_halves = grid == "minima16";
  if (is_nested && offset == Offset::zeros) throw std::invalid_argument("nested scales have no zeros beside them");
  if (is_e4m3 && offset != Offset::none) throw std::invalid_argument("scales of E4M3 have no minima beside them");
  if (is_e8m0 && offset != Offset::none) throw std::invalid_argument("scales of E8M0 have neither zeros nor minima beside them");
  if (has_halves && scale != "f16" && scale != "bf16") throw std::invalid_argument("minima of 16 bits stand beside scales of as many");
  const Source factors = offset == Offset::minima ? Source::f16 : Source::f32;
  const Source source = named<Source>("type of scales", scale, {{"f32", Source::f32}, {"bf16", Source::bf16}, {"f16", Source::f16}, {"s8", factors}, {"e4m3", factors}, {"e8m0", Source::bf16}});
  return {source, offset, levels, is_nested, is_e4m3, is_e8m0, has_halves};
}

namespace {

// Whether scales are as the grid says: s8, or E4M3 and E8M0 as their bits.
bool are_scales(const AnyArray& array, const Grid& grid) {
  if (!grid.nested && !grid.e8m0) return source_of(array) == grid.scale;
  return array.dtype().code == static_cast<uint8_t>(grid.e4m3 || grid.e8m0 ? nb::dlpack::dtype_code::UInt : nb::dlpack::dtype_code::Int) && array.dtype().bits == 8;
}

}  // namespace

int add_coded_linear(Program& program, const LinearShape& shape, const std::vector<Coded>& arrays, std::optional<F32Vector> bias) {
  std::vector<CodePart> parts;
  int64_t rows = 0;
  const bool has_groups = is_grouped(shape.format) || (shape.format == Format::fp8 && shape.group != 0);
  const int64_t groups = has_groups ? (shape.k + shape.group - 1) / shape.group : 1;
  const bool is_nested = shape.grid.nested;
  for (const auto& [codes, scales, offsets, factors] : arrays) {
    const int64_t n = static_cast<int64_t>(codes.shape(0));
    auto require = [&](const AnyArray& array, int64_t width) {
      // the stride along an axis of one entry says nothing
      const bool is_whole = array.ndim() == 2 && static_cast<int64_t>(array.shape(0)) == n && static_cast<int64_t>(array.shape(1)) == width &&
                            (width == 1 || array.stride(1) == 1) && (n == 1 || array.stride(0) == width);
      if (!is_whole)
        throw std::invalid_argument("scales and offsets must be contiguous, one for each row and group, and factors for each row and block");
    };
    if (static_cast<int64_t>(codes.shape(1)) != shape.k) throw std::invalid_argument("the codes' second axis is not k");
    require(scales, groups);
    if (!are_scales(scales, shape.grid)) throw std::invalid_argument("the scales have another type than the shape says");
    if (factors.has_value() != is_nested) throw std::invalid_argument("nested scales have factors, and others none");
    if (factors) {
      require(*factors, (shape.grid.scale == Source::f16 ? 2 : 1) * ((shape.k + kNestedInputs - 1) / kNestedInputs));
      if (source_of(*factors) != shape.grid.scale) throw std::invalid_argument("factors are f16 beside minima, else f32");
    }
    if (offsets.has_value() != (shape.grid.offset != Offset::none)) throw std::invalid_argument("the offsets and the shape's grid disagree");
    if (offsets) {
      require(*offsets, groups);
      const size_t bits = shape.grid.offset == Offset::zeros || is_nested ? 8 : 32;
      if (shape.grid.halves ? source_of(*offsets) != shape.grid.scale : offsets->dtype().bits != bits) throw std::invalid_argument("the offsets have another type than the shape's grid");
    }
    parts.push_back({codes.data(), scales.data(), offsets ? offsets->data() : nullptr, n, factors ? factors->data() : nullptr});
    rows += n;
  }
  if (rows != shape.n) throw std::invalid_argument("the parts' rows do not add up to n");
  if (bias.has_value() != shape.has_bias || (bias && static_cast<int64_t>(bias->shape(0)) != shape.n)) throw std::invalid_argument("the bias is not n long");
  const float* bias_data = bias ? bias->data() : nullptr;
  const Unlocked unlocked;
  return program.add_coded_linear(shape, parts, bias_data);
}

}  // namespace diptych
