// A reader of just enough of ONNX's protocol buffer; see onnx_model.h. Numbers of fields are those of onnx.proto.
#include "onnx_model.h"

#include "error.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace attune::tools {

namespace {

static_assert(std::endian::native == std::endian::little, "protocol buffers are little-endian");

// The fields of one message, one after the other. Everything is checked against the end of the bytes.
class Fields {
  public:
    Fields(std::string_view bytes, const char *what) : bytes_(bytes), what_(what) {}

    // The next field, if there is one. Its value is in integer() or bytes(), by its wire type.
    bool next() {
        if (at_ == bytes_.size()) return false;
        const uint64_t key = varint();
        number_ = key >> 3;
        wire_ = int(key & 7);
        if (number_ == 0) broken("a field has number 0");
        switch (wire_) {
        case 0:
            integer_ = varint();
            break;
        case 1:
            value_ = take(8);
            break;
        case 2:
            value_ = take(varint());
            break;
        case 5:
            value_ = take(4);
            break;
        default:
            broken(fmt::format("field {} has wire type {}", number_, wire_));
        }
        return true;
    }

    uint64_t number() const { return number_; }
    int64_t integer() const {
        expect(0, "an integer");
        return int64_t(integer_);
    }
    std::string_view bytes() const {
        expect(2, "bytes");
        return value_;
    }
    // JSON is UTF-8, and a name that is not would fail much later.
    std::string text() const {
        const std::string s(bytes());
        try {
            static_cast<void>(nlohmann::json(s).dump());
        } catch (const nlohmann::json::exception &) {
            broken(fmt::format("field {} is not UTF-8", number_));
        }
        return s;
    }
    float real() const {
        expect(5, "a float");
        float x;
        std::memcpy(&x, value_.data(), 4);
        return x;
    }

  private:
    [[noreturn]] void broken(const std::string &why) const {
        fail("the model's {} is broken near its byte {} of {}: {}; expected a .onnx file", what_, at_, bytes_.size(),
             why);
    }
    void expect(int wire, const char *type) const {
        if (wire_ != wire) broken(fmt::format("field {} has wire type {}, not that of {}", number_, wire_, type));
    }
    uint64_t varint() {
        uint64_t value = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            const uint64_t byte = uint8_t(take(1)[0]);
            value |= (byte & 0x7f) << shift;
            if (byte < 0x80) return value;
        }
        broken("an integer has more than 10 bytes");
    }
    std::string_view take(uint64_t size) {
        if (size > bytes_.size() - at_)
            broken(fmt::format("{} bytes are wanted and {} left", size, bytes_.size() - at_));
        at_ += size;
        return bytes_.substr(at_ - size, size);
    }

    std::string_view bytes_, value_;
    const char *what_;
    uint64_t at_ = 0, number_ = 0, integer_ = 0;
    int wire_ = 0;
};

// AttributeProto: what operators of interest have are numbers.
void read_attribute(std::string_view bytes, nlohmann::json &attributes) {
    constexpr int64_t kFloat = 1, kInt = 2;
    std::string name;
    float real = 0;
    int64_t integer = 0, type = 0;
    for (Fields f(bytes, "attribute"); f.next();) {
        if (f.number() == 1) name = f.text();
        if (f.number() == 2) real = f.real();
        if (f.number() == 3) integer = f.integer();
        if (f.number() == 20) type = f.integer();
    }
    if (type == kFloat)
        attributes[name] = real;
    else if (type == kInt)
        attributes[name] = integer;
    else
        fail("attribute {} has type {}: expected {} (FLOAT) or {} (INT)", name, type, kFloat, kInt);
}

// NodeProto; null if it is another operator.
nlohmann::json read_node(std::string_view bytes) {
    std::string name, op_type, domain;
    nlohmann::json inputs = nlohmann::json::array(), outputs = inputs, attributes = nlohmann::json::object();
    std::vector<std::string_view> unread;
    for (Fields f(bytes, "node"); f.next();) {
        if (f.number() == 1) inputs.push_back(f.text());
        if (f.number() == 2) outputs.push_back(f.text());
        if (f.number() == 3) name = f.text();
        if (f.number() == 4) op_type = f.text();
        if (f.number() == 5) unread.push_back(f.bytes());
        if (f.number() == 7) domain = f.text();
    }
    if (op_type != "Attention" || (!domain.empty() && domain != "ai.onnx")) return nullptr;
    for (std::string_view attribute : unread) read_attribute(attribute, attributes);
    if (name.empty() && !outputs.empty()) name = outputs[0].get<std::string>();
    return {{"name", name}, {"op_type", op_type}, {"inputs", inputs}, {"outputs", outputs}, {"attributes", attributes}};
}

} // namespace

std::vector<nlohmann::json> onnx_attention_nodes(std::string_view model) {
    std::vector<nlohmann::json> nodes;
    int64_t opset = -1;
    bool has_graph = false;
    for (Fields f(model, "file"); f.next();) {
        if (f.number() == 7) { // GraphProto
            has_graph = true;
            for (Fields g(f.bytes(), "graph"); g.next();)
                if (g.number() == 1)
                    if (auto node = read_node(g.bytes()); !node.is_null()) nodes.push_back(std::move(node));
        }
        if (f.number() == 8) { // OperatorSetIdProto
            std::string domain;
            int64_t version = 0;
            for (Fields o(f.bytes(), "opset_import"); o.next();) {
                if (o.number() == 1) domain = o.text();
                if (o.number() == 2) version = o.integer();
            }
            if (domain.empty() || domain == "ai.onnx") opset = version;
        }
    }
    if (!has_graph || opset < 0)
        fail("the model has no {}: expected a .onnx file", has_graph ? "opset of the domain ai.onnx" : "graph");
    for (auto &node : nodes) node["opset"] = opset;
    return nodes;
}

} // namespace attune::tools
