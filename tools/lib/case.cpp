// The case syntax: parsing with exact messages, printing, and the arithmetic of useful work.
#include "case.h"

#include "error.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <set>
#include <tuple>

namespace attune::tools {
namespace {

constexpr std::string_view kExample = "f32:b1:h8/2:n1024:m4096:d64/64:causal";
// 2^40 is more than any array that fits a machine, and small enough for products of two sizes to fit int64.
constexpr int64_t kLargestSize = int64_t(1) << 40;
constexpr int64_t kLongestList = 1 << 24;

constexpr struct {
    std::string_view form, meaning;
} kParts[] = {
    {"f32|bf16|f16", "type of Q and O (and of K and V, unless kv= is given); comes first"},
    {"bN", "batch size (default 1)"},
    {"hQ/KV", "query heads / key-value heads; Q must be a multiple of KV (default 1; h8 means h8/8)"},
    {"nN", "queries"},
    {"mM", "keys (default: as many as queries)"},
    {"dK/V", "features of queries and keys / of values (d64 means d64/64)"},
    {"causal", "key j is visible to row i iff j <= i + offset"},
    {"causal-br", "causal with offset m - n, so that the last row sees the last key"},
    {"offset=I", "row i stands at i + I among the keys; I,J,… gives one for each batch"},
    {"window=L,R", "only keys from L to the left to R to the right of the row's position; -1: unbounded"},
    {"mask=bool", "a mask [B,1,1,M] in which a key is visible with probability 0.8"},
    {"mask=bias", "an additive bias [1,Hq,N,M] from N(0,1)"},
    {"kvlen=I,J,…", "the number of keys that exist in each batch; a single number stands for all"},
    {"varlen=I,J,…", "packed sequences, of so many queries each; b, n and m then follow from them"},
    {"varlenk=I,J,…", "their keys (default: as many as queries); causal-br holds for each sequence"},
    {"softcap=C", "score s becomes C tanh(s / C)"},
    {"alibi", "ALiBi: adds -slope |i + offset - j| to a score"},
    {"sink", "one more logit for each head in the softmax's denominator"},
    {"scale=S", "factor of q.k (default 1/sqrt(d_k))"},
    {"layout=L", "how Q, K, V, O lie in memory: bhsd (default), bshd or col"},
    {"kv=T", "type of K and V"},
};

class Parser {
  public:
    explicit Parser(std::string_view text) : text_(text) {}

    Case parse() {
        if (text_.empty()) error("is empty", "something like {}", kExample);
        std::string_view rest = text_;
        bool first = true;
        for (bool more = true; more; first = false) {
            const size_t colon = rest.find(':');
            const std::string_view part = rest.substr(0, colon);
            more = colon != std::string_view::npos;
            if (more) rest.remove_prefix(colon + 1);
            if (first)
                type(part);
            else
                token(part);
        }
        finish();
        return case_;
    }

  private:
    template <typename... Args>
    [[noreturn]] void error(const std::string &what, fmt::format_string<Args...> expected, Args &&...args) const {
        fail("case '{}': {}; expected {}", text_, what, fmt::format(expected, std::forward<Args>(args)...));
    }

    void once(std::string_view key) {
        if (!seen_.insert(std::string(key)).second)
            error(fmt::format("'{}' is given twice", key), "each part at most once");
    }

    attune_dtype dtype(std::string_view name, std::string_view value) const {
        for (attune_dtype t : {ATTUNE_F32, ATTUNE_BF16, ATTUNE_F16})
            if (dtype_name(t) == value) return t;
        error(fmt::format("{}={}", name, value), "f32, bf16 or f16");
    }

    void type(std::string_view part) {
        if (part != "f32" && part != "bf16" && part != "f16")
            error(fmt::format("it begins with '{}'", part), "a type first (f32, bf16 or f16), as in {}", kExample);
        case_.dtype = case_.kv_dtype = dtype("type", part);
    }

    int64_t integer(std::string_view name, std::string_view value, int64_t least, int64_t most) const {
        int64_t number = 0;
        const char *end = value.data() + value.size();
        const auto result = std::from_chars(value.data(), end, number);
        const bool out_of_range = result.ec == std::errc::result_out_of_range ||
                                  (result.ec == std::errc() && (number < least || number > most));
        if (value.empty() || (result.ec != std::errc() && !out_of_range) || result.ptr != end)
            error(fmt::format("{}={}", name, value), "a whole number");
        if (out_of_range) {
            if (most == kLargestSize) error(fmt::format("{}={}", name, value), "at least {} (and at most 2^40)", least);
            error(fmt::format("{}={}", name, value), "a number from {} to {}", least, most);
        }
        return number;
    }

    int64_t size(std::string_view name, std::string_view value, int64_t least = 0) const {
        return integer(name, value, least, kLargestSize);
    }

    float real(std::string_view name, std::string_view value) const {
        float number = 0;
        const char *end = value.data() + value.size();
        const auto result = std::from_chars(value.data(), end, number);
        if (value.empty() || result.ec != std::errc() || result.ptr != end || !std::isfinite(number))
            error(fmt::format("{}={}", name, value), "a finite number");
        return number;
    }

    std::vector<int64_t> list(std::string_view name, std::string_view value, int64_t least, int64_t most) const {
        std::vector<int64_t> numbers;
        while (true) {
            const size_t comma = value.find(',');
            numbers.push_back(integer(name, value.substr(0, comma), least, most));
            if (comma == std::string_view::npos) return numbers;
            value.remove_prefix(comma + 1);
            if (value.empty() && numbers.size() == 1) return numbers; // "3,": a list of one
        }
    }

    void token(std::string_view part) {
        const size_t equals = part.find('=');
        if (equals != std::string_view::npos)
            setting(part.substr(0, equals), part.substr(equals + 1));
        else if (part == "causal" || part == "causal-br") {
            once("causal");
            case_.causal = part == "causal" ? Causal::top_left : Causal::bottom_right;
        } else if (part == "alibi") {
            once(part);
            case_.alibi = true;
        } else if (part == "sink") {
            once(part);
            case_.sink = true;
        } else if (part.size() >= 2 && std::string_view("bhnmd").find(part[0]) != std::string_view::npos &&
                   std::string_view("-+.0123456789").find(part[1]) != std::string_view::npos)
            dimension(part.substr(0, 1), part.substr(1));
        else
            unknown(part);
    }

    void dimension(std::string_view name, std::string_view value) {
        once(name);
        const size_t slash = value.find('/');
        const bool pair = slash != std::string_view::npos;
        if (name == "h") {
            case_.Hq = size("h", value.substr(0, slash));
            case_.Hkv = pair ? size("h (key-value heads)", value.substr(slash + 1), 1) : case_.Hq;
            if (case_.Hkv != 0 && case_.Hq % case_.Hkv != 0)
                error(fmt::format("h{}", value), "query heads ({}) to be a multiple of key-value heads ({})", case_.Hq,
                      case_.Hkv);
        } else if (name == "d") {
            case_.dk = size("d", value.substr(0, slash), 1);
            case_.dv = pair ? size("d_v", value.substr(slash + 1)) : case_.dk;
        } else if (name == "b") {
            case_.B = size(name, value);
        } else if (name == "n") {
            case_.N = size(name, value);
        } else {
            case_.M = size(name, value);
        }
    }

    void setting(std::string_view name, std::string_view value) {
        if (name == "mask") {
            if (value == "bool") {
                once("mask=bool");
                case_.mask = true;
            } else if (value == "bias") {
                once("mask=bias");
                case_.bias = true;
            } else
                error(fmt::format("mask={}", value), "mask=bool or mask=bias (both may be given)");
            return;
        }
        if (name == "offset") {
            once(name);
            const auto numbers = list(name, value, INT64_MIN, INT64_MAX);
            if (value.find(',') == std::string_view::npos)
                case_.offset = numbers[0];
            else
                case_.offsets = numbers;
        } else if (name == "window") {
            once(name);
            const auto numbers = list(name, value, -1, INT64_MAX);
            if (numbers.size() != 2)
                error(fmt::format("window={}", value),
                      "two numbers, left and right, as in window=256,0 (-1: unbounded)");
            case_.window_left = numbers[0];
            case_.window_right = numbers[1];
        } else if (name == "kvlen") {
            once(name);
            case_.kv_len = list(name, value, 0, kLargestSize);
        } else if (name == "varlen" || name == "varlenk") {
            once(name);
            (name == "varlen" ? case_.q_lens : case_.k_lens) = list(name, value, 0, kLargestSize);
        } else if (name == "softcap") {
            once(name);
            case_.softcap = real(name, value);
            if (!(*case_.softcap > 0)) error(fmt::format("softcap={}", value), "a number above 0");
        } else if (name == "scale") {
            once(name);
            case_.scale = real(name, value);
        } else if (name == "layout") {
            once(name);
            for (Layout layout : {Layout::bhsd, Layout::bshd, Layout::col})
                if (layout_name(layout) == value) {
                    case_.layout = layout;
                    return;
                }
            error(fmt::format("layout={}", value), "bhsd, bshd or col");
        } else if (name == "kv") {
            once(name);
            case_.kv_dtype = dtype(name, value);
        } else if (std::string_view("bhnmd").find(name) != std::string_view::npos && name.size() == 1) {
            error(fmt::format("'{}={}'", name, value), "{}{} (sizes are written without '=')", name, value);
        } else {
            unknown(fmt::format("{}={}", name, value));
        }
    }

    [[noreturn]] void unknown(std::string_view part) const {
        std::string known;
        for (const auto &p : kParts) known += fmt::format("{}{}", known.empty() ? "" : " ", p.form);
        error(fmt::format("'{}' is not a part of a case", part), "one of: {}", known);
    }

    // What packed sequences leave out, from their lengths.
    void finish_lengths() {
        if (case_.q_lens.empty()) {
            if (seen_.count("varlenk")) error("varlenk= is given without varlen=", "both, or varlen= alone");
            return;
        }
        if (!seen_.count("varlenk")) case_.k_lens = case_.q_lens;
        const auto sequences = int64_t(case_.q_lens.size());
        if (int64_t(case_.k_lens.size()) != sequences)
            error(fmt::format("varlenk= has {} numbers", case_.k_lens.size()), "as many as varlen= ({})", sequences);
        if (seen_.count("b") && case_.B != sequences)
            error(fmt::format("b{}", case_.B), "the number of sequences of varlen= ({}), or none", sequences);
        case_.B = sequences;
        for (auto [name, size, lengths] : {std::tuple{"n", &case_.N, &case_.q_lens}, {"m", &case_.M, &case_.k_lens}}) {
            const int64_t longest = *std::max_element(lengths->begin(), lengths->end());
            if (!seen_.count(name))
                *size = longest;
            else if (*size < longest)
                error(fmt::format("{}{}", name, *size), "at least the longest sequence ({}), or none", longest);
            seen_.insert(name);
        }
    }

    void finish() {
        finish_lengths();
        for (const char *name : {"n", "d"})
            if (!seen_.count(name))
                error(fmt::format("{} is missing", name), "the number of {}, as in {}",
                      *name == 'n' ? "queries" : "features", kExample);
        if (!seen_.count("m")) case_.M = case_.N;
        if (case_.causal == Causal::bottom_right && seen_.count("offset"))
            error("both causal-br and offset= are given", "one of them (causal-br means causal with offset m - n)");
        if (!case_.offsets.empty() && int64_t(case_.offsets.size()) != case_.B)
            error(fmt::format("offset= has {} numbers", case_.offsets.size()), "one for each batch (b={})", case_.B);
        if (case_.kv_len.size() == 1 && case_.B > kLongestList)
            error(fmt::format("b{}", case_.B), "at most {} where kvlen= stands for all", kLongestList);
        if (case_.kv_len.size() == 1 && case_.B != 1) case_.kv_len.resize(case_.B, case_.kv_len[0]);
        if (!case_.kv_len.empty() && int64_t(case_.kv_len.size()) != case_.B)
            error(fmt::format("kvlen= has {} numbers", case_.kv_len.size()), "one for each batch (b={})", case_.B);
        for (int64_t b = 0; b < int64_t(case_.kv_len.size()); ++b)
            if (case_.kv_len[b] > keys_of(case_, b))
                error(fmt::format("kvlen={}", case_.kv_len[b]), "at most the number of keys ({}{})",
                      case_.q_lens.empty() ? "m=" : "", keys_of(case_, b));
    }

    std::string_view text_;
    Case case_;
    std::set<std::string> seen_;
};

std::string join(const std::vector<int64_t> &numbers) {
    return fmt::format("{}", fmt::join(numbers, ","));
}

} // namespace

std::string_view dtype_name(attune_dtype dtype) {
    switch (dtype) {
    case ATTUNE_F32:
        return "f32";
    case ATTUNE_BF16:
        return "bf16";
    case ATTUNE_F16:
        return "f16";
    case ATTUNE_U8:
        return "u8";
    case ATTUNE_I64:
        return "i64";
    case ATTUNE_I32:
        return "i32";
    }
    return "?";
}

std::string_view layout_name(Layout layout) {
    switch (layout) {
    case Layout::bhsd:
        return "bhsd";
    case Layout::bshd:
        return "bshd";
    case Layout::col:
        return "col";
    }
    return "?";
}

Case parse_case(std::string_view text) {
    return Parser(text).parse();
}

std::string to_string(const Case &c) {
    std::string s = fmt::format("{}:b{}:h{}", dtype_name(c.dtype), c.B, c.Hq);
    if (c.Hkv != c.Hq) s += fmt::format("/{}", c.Hkv);
    const auto longest = [](const std::vector<int64_t> &l) {
        return l.empty() ? -1 : *std::max_element(l.begin(), l.end());
    };
    if (c.N != longest(c.q_lens)) s += fmt::format(":n{}", c.N);
    if (c.M != (c.k_lens.empty() ? c.N : longest(c.k_lens))) s += fmt::format(":m{}", c.M);
    s += fmt::format(":d{}", c.dk);
    if (c.dv != c.dk) s += fmt::format("/{}", c.dv);
    if (c.causal == Causal::top_left) s += ":causal";
    if (c.causal == Causal::bottom_right) s += ":causal-br";
    if (!c.offsets.empty())
        s += fmt::format(":offset={}{}", join(c.offsets), c.offsets.size() == 1 ? "," : "");
    else if (c.offset != 0)
        s += fmt::format(":offset={}", c.offset);
    if (c.window_left != -1 || c.window_right != -1) s += fmt::format(":window={},{}", c.window_left, c.window_right);
    if (c.mask) s += ":mask=bool";
    if (c.bias) s += ":mask=bias";
    if (!c.kv_len.empty()) {
        const bool same = std::all_of(c.kv_len.begin(), c.kv_len.end(), [&](int64_t l) { return l == c.kv_len[0]; });
        s += fmt::format(":kvlen={}", same ? fmt::format("{}", c.kv_len[0]) : join(c.kv_len));
    }
    if (!c.q_lens.empty()) s += fmt::format(":varlen={}", join(c.q_lens));
    if (c.k_lens != c.q_lens) s += fmt::format(":varlenk={}", join(c.k_lens));
    if (c.softcap) s += fmt::format(":softcap={}", *c.softcap);
    if (c.alibi) s += ":alibi";
    if (c.sink) s += ":sink";
    if (c.scale) s += fmt::format(":scale={}", *c.scale);
    if (c.layout != Layout::bhsd) s += fmt::format(":layout={}", layout_name(c.layout));
    if (c.kv_dtype != c.dtype) s += fmt::format(":kv={}", dtype_name(c.kv_dtype));
    return s;
}

attune_problem to_problem(const Case &c) {
    attune_problem p;
    attune_problem_init(&p);
    p.q_dtype = p.o_dtype = c.dtype;
    p.kv_dtype = c.kv_dtype;
    p.B = c.B;
    p.Hq = c.Hq;
    p.Hkv = c.Hkv;
    p.N = c.N;
    p.M = c.M;
    p.dk = c.dk;
    p.dv = c.dv;
    const auto flag = [&p](bool set, uint32_t bit) {
        if (set) p.flags |= bit;
    };
    flag(c.scale.has_value(), ATTUNE_SCALE);
    flag(c.causal != Causal::none, ATTUNE_CAUSAL);
    flag(c.mask, ATTUNE_MASK);
    flag(c.bias, ATTUNE_BIAS);
    flag(!c.kv_len.empty(), ATTUNE_KV_LEN);
    flag(!c.offsets.empty(), ATTUNE_OFFSETS);
    flag(c.softcap.has_value(), ATTUNE_SOFTCAP);
    flag(c.alibi, ATTUNE_ALIBI);
    flag(c.sink, ATTUNE_SINK);
    flag(c.layout == Layout::col, ATTUNE_STRIDED_V);
    if (!c.q_lens.empty()) {
        flag(true, ATTUNE_VARLEN);
        flag(c.causal == Causal::bottom_right, ATTUNE_OFFSETS); // M - N of each sequence
    }
    p.scale = c.scale.value_or(0.0f);
    p.softcap = c.softcap.value_or(0.0f);
    p.offset = c.causal == Causal::bottom_right ? c.M - c.N : c.offset;
    p.window_left = c.window_left;
    p.window_right = c.window_right;
    return p;
}

int64_t offset_of(const Case &c, int64_t batch) {
    if (!c.offsets.empty()) return c.offsets[batch];
    return c.causal == Causal::bottom_right ? keys_of(c, batch) - rows_of(c, batch) : c.offset;
}

int64_t rows_of(const Case &c, int64_t batch) {
    return c.q_lens.empty() ? c.N : c.q_lens[size_t(batch)];
}

int64_t keys_of(const Case &c, int64_t batch) {
    return c.q_lens.empty() ? c.M : c.k_lens[size_t(batch)];
}

int64_t total_rows(const Case &c) {
    return c.q_lens.empty() ? c.B * c.N : std::accumulate(c.q_lens.begin(), c.q_lens.end(), int64_t(0));
}

int64_t total_keys(const Case &c) {
    return c.q_lens.empty() ? c.B * c.M : std::accumulate(c.k_lens.begin(), c.k_lens.end(), int64_t(0));
}

int64_t visible_pairs(const Case &c) {
    __extension__ typedef __int128 wide; // positions of any int64 offset and window
    int64_t pairs = 0;
    for (int64_t b = 0; b < c.B; ++b) {
        const wide keys = c.kv_len.empty() ? keys_of(c, b) : c.kv_len[b];
        for (int64_t i = 0; i < rows_of(c, b); ++i) {
            const wide position = wide(i) + offset_of(c, b);
            wide begin = 0, end = keys;
            if (c.causal != Causal::none) end = std::min(end, position + 1);
            if (c.window_left >= 0) begin = std::max(begin, position - c.window_left);
            if (c.window_right >= 0) end = std::min(end, position + c.window_right + 1);
            if (end > begin) pairs += int64_t(end - begin);
        }
    }
    return pairs;
}

double useful_flops(const Case &c) {
    return 2.0 * double(c.dk + c.dv) * double(c.Hq) * double(visible_pairs(c));
}

double least_bytes(const Case &c) {
    const auto width = [](attune_dtype t) { return t == ATTUNE_F32 ? 4.0 : 2.0; };
    double keys = 0;
    for (int64_t b = 0; b < c.B; ++b) keys += double(c.kv_len.empty() ? keys_of(c, b) : c.kv_len[b]);
    const double d = double(c.dk + c.dv);
    return width(c.kv_dtype) * keys * double(c.Hkv) * d + width(c.dtype) * double(total_rows(c)) * double(c.Hq) * d;
}

std::string case_syntax() {
    std::string s =
        fmt::format("A CASE is one attention problem, for example {}. Its parts, separated by colons:\n", kExample);
    for (const auto &p : kParts) s += fmt::format("  {:<14} {}\n", p.form, p.meaning);
    return s;
}

} // namespace attune::tools
